"""`hexijax export`: a run's parameters in a form that others read.

RUN --to orbax|safetensors -> weights.export -> a folder or a file
"""

import argparse

from hexijax.report.words import gib
from hexijax.weights import export


def run_export(arguments: argparse.Namespace) -> int:
    """Writes, and says what; returns the exit code."""
    written = export(
        arguments.run,
        arguments.to,
        out=arguments.out,
        names=arguments.names,
        step=arguments.step,
        dtype=arguments.dtype,
    )
    dtypes = sorted({tensor.dtype.name for tensor in written.tensors.values()})
    named = f" under the names of {arguments.names}" if arguments.names else ""
    print(
        f"{written.path}: {len(written.tensors)} tensors{named}, {', '.join(dtypes)}, "
        f"{gib(written.num_bytes)}, after step {written.step}"
    )
    if written.narrowed:
        print(
            f"{written.narrowed} of them were trained in more digits than the weights "
            "the run began with have; --dtype float32 keeps them."
        )
    return 0
