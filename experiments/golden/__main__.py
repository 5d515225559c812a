"""Prints the tables asked for; all of them if none is.

    python -m experiments.golden hexiscale autohet --json golden.json

Exits with 1 where a figure is past its limit, with 2 where a case cannot be read.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from experiments.golden import autohet, hethub, hexiscale, matched
from experiments.golden.table import Table
from hexijax.errors import UserError

TABLES: Mapping[str, Callable[[], Table]] = MappingProxyType(
    {
        "hexiscale": hexiscale.make_table,
        "matched": matched.make_table,
        "autohet": autohet.make_table,
        "hethub-files": hethub.make_small_table,
        "hethub": hethub.make_table,
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints tables to stdout, what falls short and seconds to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.golden",
        description="Figures that others published, beside ours.",
    )
    parser.add_argument(
        "systems", nargs="*", choices=[*TABLES, []], help="tables; none: all"
    )
    parser.add_argument("--json", type=Path, help="writes every figure to a file")
    arguments = parser.parse_args(argv)
    made: dict[str, Table] = {}
    for name in arguments.systems or TABLES:
        begun_s = time.process_time()
        try:
            made[name] = TABLES[name]()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(made[name].render(), end="\n\n", flush=True)
        print(f"{name}: {time.process_time() - begun_s:.0f} CPU s", file=sys.stderr)
    if arguments.json:
        data = {name: table.to_json() for name, table in made.items()}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    faults = [fault for table in made.values() for fault in table.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
