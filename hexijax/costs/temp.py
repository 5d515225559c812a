"""What a program holds beside arguments and outputs: by XLA's word where it is known.

    a compiled plan -> Temps -> temps.json beside it -> the promise of the same segments

The model of `costs.activations` says what a backward must hold. On CPUs what a compiler
makes of it depends on its version: the factors are the worst that
`experiments/memory_table.py` shows over all models and remat policies. A segment that
was compiled once has its own figure, which replaces the model's.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hexijax.cluster import DeviceProfile
from hexijax.layers.chain import Layer, Remat

FACTORS = {
    ("cpu", "0.10", "float32"): 1.6,
    ("cpu", "0.10", "bfloat16"): 2.9,
    ("cpu", "0.12", "float32"): 1.15,
    ("cpu", "0.12", "bfloat16"): 1.9,
}
"""By vendor, JAX version and compute dtype. XLA:CPU ignores what keeps recomputation
late, old versions of it run all layers' at once, and bfloat16 is float32 inside."""

OTHER_CPU, OTHER_CPU_HALF = 1.6, 2.9
"""Of a JAX version nobody measured: the worst of those known."""


@functools.cache
def jax_version() -> str:
    """The installed JAX's ``major.minor``; empty where there is none."""
    try:
        installed = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return ".".join(installed.split(".")[:2])


def temp_factor(profile: DeviceProfile, dtype: str) -> float:
    """What the model's figure is multiplied with on a kind."""
    other = 1.0
    if profile.vendor == "cpu":
        other = OTHER_CPU if dtype == "float32" else OTHER_CPU_HALF
    return FACTORS.get((profile.vendor, jax_version(), dtype), other)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TempKey:
    """Equal for segments that compile to the same program."""

    kind: str
    """Of the device."""

    jax: str
    """``major.minor``."""

    layers: str
    """Digest of the layers' signatures and remat policies."""

    dtype: str
    """Compute dtype."""

    tensor: int
    """Tensor degree."""

    samples: int
    """Of one lane's microbatch."""

    joined: bool
    """Forward and backward in one program."""

    @classmethod
    def of(
        cls,
        profile: DeviceProfile,
        layers: Sequence[Layer],
        remat: Sequence[Remat],
        *,
        dtype: str,
        tensor: int,
        samples: int,
        joined: bool,
    ) -> "TempKey":
        """The key of a run of layers on a kind, as the JAX installed here compiles."""
        parts = (f"{x.signature}/{p}" for x, p in zip(layers, remat, strict=True))
        return cls(
            kind=profile.kind,
            jax=jax_version(),
            layers=hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16],
            dtype=dtype,
            tensor=tensor,
            samples=samples,
            joined=joined,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Temps:
    """Compiled figures: temp bytes by segment."""

    compiled: Mapping[TempKey, int] = dataclasses.field(default_factory=dict)

    def with_rows(self, rows: Iterable[tuple[TempKey, int]]) -> "Temps":
        """With further figures; a newer one replaces an older."""
        return Temps({**self.compiled, **dict(rows)})

    def to_json(self) -> list[dict[str, Any]]:
        """Rows; ``from_json`` undoes it."""
        return [
            {**dataclasses.asdict(key), "temp_bytes": num_bytes}
            for key, num_bytes in self.compiled.items()
        ]

    @classmethod
    def from_json(cls, rows: Iterable[Mapping[str, Any]]) -> "Temps":
        """What ``to_json`` gave."""
        found: dict[TempKey, int] = {}
        for row in rows:
            fields = dict(row)
            num_bytes = fields.pop("temp_bytes")
            found[TempKey(**fields)] = num_bytes
        return cls(found)
