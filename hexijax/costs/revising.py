"""The shares of data-sheet peaks that kinds are taken to sustain, beside measured ones.

    python -m hexijax.costs.revising profile.toml
    python -m hexijax.costs.revising docs/measured/h200_kinds.json

A profile file of `hexijax profile`, or what `experiments.bench_emulated` has written.
Layer times overrule the shares where they were measured; this is for whoever wants
better ones for all that was not.
"""

import dataclasses
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hexijax.cluster import catalog
from hexijax.cluster.document import load_measured
from hexijax.costs.rates import MEMORY_FRACTION, MEMORY_SOURCE, product_share
from hexijax.errors import UserError

HOW = (
    "To revise a share for all cards like these, write it into hexijax/costs/rates.py",
    "with this measurement as its source; a share without one stays as it is.",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a card sustains of its data sheet."""

    kind: str
    """Of the catalog, or as a profile declares it."""

    what: str
    """Which peak."""

    measured: float
    """Of it."""

    taken: float
    """Of it, where nothing was measured."""

    source: str
    """Where that comes from."""

    def __str__(self) -> str:
        return (
            f"{self.kind}, {self.what}: {self.measured:.2f} of the peak measured, "
            f"{self.taken:.2f} taken ({self.source})"
        )


def shares(file: Path) -> Iterator[Share]:
    """Of every kind in a file that has a peak to compare with.

    Raises:
      UserError: the file holds no such measurements.
    """
    found = [*_cards(file)]
    if not found:
        raise UserError(
            f"{file} has no measured products: give a profile file of `hexijax "
            "profile`, or the JSON of `python -m experiments.bench_emulated` with its "
            "part `check`."
        )
    for kind, dtype, flops_per_s, bytes_per_s in found:
        known = catalog.profiles()
        if file.suffix == ".toml":
            known = {**known, **load_measured(file, known).kinds}
        profile = known.get(kind)
        if profile is None or dtype not in profile.native_dtypes:
            continue
        peak, taken, source = product_share(profile, dtype)
        yield Share(
            kind=kind,
            what=f"products in {dtype}",
            measured=flops_per_s / peak,
            taken=taken,
            source=source,
        )
        if bytes_per_s is not None:
            yield Share(
                kind=kind,
                what="memory",
                measured=bytes_per_s / profile.memory_bytes_per_s,
                taken=MEMORY_FRACTION,
                source=MEMORY_SOURCE,
            )


def _cards(file: Path) -> Iterator[tuple[str, str, float, float | None]]:
    """Kind, dtype, FLOP/s and bytes a second of each card that was measured."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".toml":
        for kind, about in tomllib.loads(text).get("measured", {}).items():
            if "product_tflops" in about:
                memory = 1e9 * about["memory_gb_per_s"]
                rate = 1e12 * about["product_tflops"]
                yield kind, about["product_dtype"], rate, memory
        return
    found: dict[str, Any] = json.loads(text)
    kind = catalog.match_device_kind(found.get("what", {}).get("card", ""))
    rates = found.get("emulated", {}).get("check", {}).get("product_flops_per_s")
    if kind and rates:
        yield kind, "bfloat16", max(rates), None  # the others are held


def main() -> None:
    """Prints the shares of each file that is named."""
    try:
        for name in sys.argv[1:]:
            for share in shares(Path(name)):
                print(share)
    except (UserError, OSError) as error:
        sys.exit(f"Error: {error}")
    print("\n".join(HOW if sys.argv[1:] else [__doc__ or ""]))


if __name__ == "__main__":
    main()
