"""What a kind sustains of its peaks, with the source of every figure.

One Llama-style training step on an H100 SXM (Llama 1.35 B, sequence 2048, microbatch 8,
cuDNN attention, JAX 0.11) is where the constants come from: matrix products alone reach
800 of 989 TFLOP/s, the whole model 520 without rematerialisation, 500 with ``dots`` and
425 with ``full``. A profile's measured layer times overrule all of it.
"""

import dataclasses

from hexijax.cluster import DeviceProfile
from hexijax.layers.chain import Remat

CALL_S = 50e-6
"""Device idle around one program call: launch, and arguments checked. The host's own
0.6 ms a call hide behind asynchronous dispatch while calls compute longer than that."""

HOST_CALL_S = 0.6e-3
"""Python's time to dispatch one call: an island cannot dispatch faster (measured)."""

MATMUL_FRACTION = 0.81
"""Of peak, in matrix products alone: 800 of 989 TFLOP/s on an H100."""

MEMORY_FRACTION = 0.8
"""Of memory bandwidth, in element-wise kernels; the usual STREAM share on GPUs."""

RECOMPUTE_FRACTION = {Remat.NONE: 0.0, Remat.DOTS: 0.12, Remat.FULL: 0.67}
"""Of a layer's forward time, what its backward adds: from 520, 500 and 425 TFLOP/s."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What one device sustains in one dtype."""

    flops_per_s: float
    """Of a whole model's layers, element-wise work between the products included."""

    memory_bytes_per_s: float
    """Of its memory."""

    source: str
    """Where the fraction of peak comes from."""

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Whichever takes longer: the arithmetic, or the fused memory traffic."""
        return max(flops / self.flops_per_s, num_bytes / self.memory_bytes_per_s)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Fraction:
    value: float
    source: str


_H100 = "520 of 989 TFLOP/s of a Llama 1.35 B step on an H100 SXM"
_FRACTIONS = {
    ("nvidia", "bfloat16"): _Fraction(value=0.53, source=_H100),
    ("nvidia", "float16"): _Fraction(value=0.53, source=f"as bfloat16: {_H100}"),
    ("nvidia", "float32"): _Fraction(value=0.60, source="assumed"),
    ("cpu", "float32"): _Fraction(value=1.0, source="a declared peak is what it gives"),
    ("cpu", "bfloat16"): _Fraction(
        value=1.0, source="a declared peak is what it gives"
    ),
}
_ASSUMED = _Fraction(value=0.5, source="assumed: half of peak, nothing was measured")


def rate(profile: DeviceProfile, dtype: str) -> Rate:
    """What a kind sustains when it computes in a dtype it has.

    float32 products run in tf32 where the kind has it: JAX's default precision.
    """
    assert dtype in profile.native_dtypes, f"{profile.kind} does not compute in {dtype}"
    peaks = profile.dense_flops_per_s
    peak = peaks.get("tf32", peaks[dtype]) if dtype == "float32" else peaks[dtype]
    fraction = _FRACTIONS.get((profile.vendor, dtype), _ASSUMED)
    return Rate(
        flops_per_s=peak * fraction.value,
        memory_bytes_per_s=profile.memory_bytes_per_s * MEMORY_FRACTION,
        source=fraction.source,
    )
