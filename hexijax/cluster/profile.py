"""What one kind of accelerator can do: the figures that planning starts from."""

import dataclasses
from collections.abc import Mapping

from hexijax.cluster.errors import ClusterError
from hexijax.cluster.record import Key, Record
from hexijax.cluster.units import (
    BANDWIDTH,
    CLOCK,
    MEMORY,
    MEMORY_OR_NONE,
    PEAK,
    POWER,
    PRICE,
    whole,
)
from hexijax.cluster.values import NAME, Choice, Flag, ListOf, MapOf, Row, Scalar, Text

VENDORS = ("nvidia", "amd", "google", "huawei", "cpu", "other")
DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "int8")
TRAINING_DTYPES = ("bfloat16", "float16", "float32")
MIB = 2**20


def usable_by_rule_bytes(nominal_bytes: int, vendor: str) -> int:
    """What JAX can use of a card's memory: 0.92 of it, and at most 1.5 GiB less.

    An assumption, until a profile says better: the CUDA or HIP context with its loaded
    kernels takes 0.5 to 1 GiB, collectives' buffers some hundred MiB, and XLA's
    allocator is told to take what is left (its own default is 0.75). Below 3 GiB half
    is taken as usable. Rounded down to whole MiB. A CPU's figure is a share of host
    memory: all of it.
    """
    if vendor == "cpu":
        return nominal_bytes
    most = min(nominal_bytes * 92 // 100, nominal_bytes - 1536 * MIB)
    return max(most, nominal_bytes // 2) // MIB * MIB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """One kind of accelerator, as one JAX device. Dicts here are never written to."""

    kind: str
    """Name of the kind, ``h100-80g-sxm``."""

    vendor: str
    """Who makes it; ``cpu`` stands for forced CPU devices, declared as a kind."""

    nominal_memory_bytes: int
    """Memory as the driver reports it."""

    dense_flops_per_s: Mapping[str, float] = dataclasses.field(hash=False)
    """Dense (never sparse) peak by dtype, sums kept in float32; operations for int8.

    ``float32`` is full precision, ``tf32`` what JAX's default precision makes of
    float32 matrix products on Ampere and newer."""

    memory_bytes_per_s: float
    """Bandwidth of its own memory."""

    host_link_bytes_per_s: float
    """Nominal bandwidth to host memory, one way."""

    usable_memory_bytes: int = 0
    """What JAX can use of it; 0 asks for ``usable_by_rule_bytes``."""

    native_dtypes: tuple[str, ...] = ()
    """Dtypes it trains in at full rate; empty: every training dtype with a peak."""

    architecture: str = ""
    """Family whose rates a clock and unit it shares, ``ampere-ga100``."""

    compute_capability: str | None = None
    """NVIDIA's number for its instruction set, ``9.0``."""

    compute_units: int | None = None
    """Multiprocessors (NVIDIA), compute units (AMD) or cores that a device has."""

    boost_clock_hz: float | None = None
    """Clock at which peaks are quoted."""

    tensor_clock_hz: float | None = None
    """Clock at which tensor-core peaks are quoted, where that is another."""

    jax_runs: bool = True
    """JAX has a backend for it; false: it can be planned for only."""

    tdp_w: float | None = None
    """Board power."""

    idle_w: float | None = None
    """Power of a device in use while it waits; None: a share of board power."""

    price_usd_per_hour: float | None = None
    """Rent of one device."""

    layer_times: tuple[Mapping[str, Scalar], ...] = dataclasses.field(
        default=(), hash=False
    )
    """Measured times of layers, one flat row each; their reader is the cost model."""

    source: str = "as declared"
    """Where the figures come from."""

    def __post_init__(self) -> None:
        if not self.usable_memory_bytes:
            usable = usable_by_rule_bytes(self.nominal_memory_bytes, self.vendor)
            object.__setattr__(self, "usable_memory_bytes", usable)
        if not self.native_dtypes:
            native = tuple(d for d in TRAINING_DTYPES if d in self.dense_flops_per_s)
            object.__setattr__(self, "native_dtypes", native)
        PROFILE.settle(self)
        if self.usable_memory_bytes > self.nominal_memory_bytes:
            raise ClusterError(
                f"kind {self.kind} has {self.usable_memory_bytes:,} usable of "
                f"{self.nominal_memory_bytes:,} bytes of memory; usable is at most "
                "nominal. Lower the usable figure, or leave it out for the rule's."
            )
        for dtype in self.native_dtypes:
            if dtype not in self.dense_flops_per_s:
                raise ClusterError(
                    f"kind {self.kind} computes natively in {dtype} but has no peak "
                    f"for it; peaks: {', '.join(self.dense_flops_per_s)}. Add the "
                    "peak, or take the dtype out of the native ones."
                )

    @property
    def train_dtype(self) -> str:
        """The dtype it trains in best: bfloat16, else float16, else float32."""
        return next((d for d in TRAINING_DTYPES if d in self.native_dtypes), "float32")

    @property
    def has_cudnn_attention(self) -> bool:
        """cuDNN's fused attention runs on it: NVIDIA, Ampere and newer."""
        return self.vendor == "nvidia" and self._capability >= (8, 0)

    @property
    def jax_extra(self) -> str | None:
        """The extra of hexijax and jax that drives it; None needs no extra.

        CUDA 13 dropped Pascal and Volta; Turing and newer also run with ``cuda12``.
        """
        if self.vendor == "nvidia":
            return "cuda13" if self._capability >= (7, 5) else "cuda12"
        return {"amd": "rocm", "google": "tpu"}.get(self.vendor)

    @property
    def _capability(self) -> tuple[int, ...]:
        """Compute capability as numbers; an unknown one counts as new."""
        text = self.compute_capability or "9.0"
        return tuple(int(part) for part in text.split("."))


PROFILE = Record(
    make=DeviceProfile,
    what="a kind",
    keys=(
        Key("kind", "kind", NAME),
        Key("vendor", "vendor", Choice(options=VENDORS)),
        Key("memory_gib", "nominal_memory_bytes", MEMORY),
        Key("usable_memory_gib", "usable_memory_bytes", MEMORY_OR_NONE),
        Key("peak_tflops", "dense_flops_per_s", MapOf(keys=DTYPES, item=PEAK)),
        Key(
            "native_dtypes",
            "native_dtypes",
            ListOf(item=Choice(options=TRAINING_DTYPES), most=len(TRAINING_DTYPES)),
        ),
        Key("memory_gb_per_s", "memory_bytes_per_s", BANDWIDTH),
        Key("host_link_gb_per_s", "host_link_bytes_per_s", BANDWIDTH),
        Key("architecture", "architecture", Text()),
        Key(
            "compute_capability",
            "compute_capability",
            Text(pattern=r"[0-9]{1,2}\.[0-9]", rule="two numbers as text, like '9.0'"),
        ),
        Key("compute_units", "compute_units", whole(most=100_000)),
        Key("boost_mhz", "boost_clock_hz", CLOCK),
        Key("tensor_mhz", "tensor_clock_hz", CLOCK),
        Key("jax_runs", "jax_runs", Flag()),
        Key("tdp_w", "tdp_w", POWER),
        Key("idle_w", "idle_w", POWER),
        Key("price_usd_per_hour", "price_usd_per_hour", PRICE),
        Key("layer_times", "layer_times", ListOf(item=Row())),
        Key("source", "source", Text()),
    ),
)
