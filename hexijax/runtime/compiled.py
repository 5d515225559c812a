"""What XLA says of a segment's compiled programs: bytes in, out, overwritten, within.

Compiled -> program_bytes -> {"forward": ProgramBytes, ...}
"""

from typing import Any

from hexijax.costs.segments import ProgramBytes
from hexijax.runtime.segments import Compiled

WAYS = ("forward", "backward", "fused")


def program_bytes(compiled: Compiled) -> dict[str, ProgramBytes]:
    """Of each program a training step runs, on one device."""
    made = {way: getattr(compiled, way) for way in WAYS}
    return {way: _bytes(program) for way, program in made.items() if program}


def _bytes(program: Any) -> ProgramBytes:
    found = program.memory_analysis()
    return ProgramBytes(
        arguments_bytes=found.argument_size_in_bytes,
        outputs_bytes=found.output_size_in_bytes,
        aliases_bytes=found.alias_size_in_bytes,
        temp_bytes=found.temp_size_in_bytes,
    )
