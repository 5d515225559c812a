"""What a kind sustains of its peaks, with the source of every figure.

Training steps of Llama on an H100 SXM (1.35 B, sequence 2048, microbatch 8, cuDNN
attention, JAX 0.11) are where the constants come from: 520 model TFLOP/s without
rematerialisation, 500 with ``dots`` and 425 with ``full``; products alone reach 800 of
989. Other kinds are held against published layer times. A profile's own measured layer
times overrule all of it; ``python -m hexijax.costs.revising`` sets a profile beside it.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from hexijax.cluster import DeviceProfile
from hexijax.layers.chain import ITEM_BYTES

CALL_S = 50e-6
"""Device idle around one program call: launch, and arguments checked. The host's own
0.6 ms a call hide behind asynchronous dispatch while calls compute longer than that."""

HOST_CALL_S = 0.6e-3
"""Python's time to dispatch one call: an island cannot dispatch faster (measured)."""

PIECE_S = 0.13e-3
"""Starting one more copy between two cards: 3,700 took half a second."""

HOST_PIECE_S = 70e-6
"""Of one array's way to pinned memory or from there, beside its bytes: 64 microseconds
out of an H200 and 76 into it, where 40 small ones go at once."""

COPIES_SHARE, COLLECTIVE_SHARE = 0.72, 0.89
"""Of the rate at which one card copies to another: what copies from and to several
others at once reach, and what NCCL does. 512 MB gathered over four H100s, of which each
gets 384: 2.42 ms in 12 pieces, and 1.77 ms, where a pair copies 245 GB/s."""

MEMORY_FRACTION = 0.8
"""Of memory bandwidth, in element-wise kernels."""

MEMORY_SOURCE = "the usual STREAM share on GPUs"
"""Where that comes from."""

RECOMPUTE_DOTS, RECOMPUTE_FULL = 0.7, 0.73
"""What a backward adds: of the forward's traffic between products under ``dots``, of
the whole forward under ``full``. From 520, 500 and 425 TFLOP/s: 4 and 22 of a hundred
parts of a step, where the forward is 31 and its traffic 6."""

RESIDUAL_PASSES = (1, 2)
"""How often a residual crosses memory where forward and backward are programs of their
own, beyond what one program would: written once, read by two kernels as a rule. Four
sequences of the model above take 133 ms in one program, 143 apart under ``dots``, 153
under ``none``."""

SPLIT_SHARE = 0.65
"""Of what a layer keeps and moves, the share that tensor parallelism divides; norms'
outputs and residual sums stay whole on every device (Megatron's 24 of 34 bytes, rounded
down)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What one device sustains in one dtype."""

    flops_per_s: float
    """Of large matrix products."""

    attention_flops_per_s: tuple[float, float]
    """Of fused attention, forward and backward."""

    memory_bytes_per_s: float
    """Of its memory."""

    item_bytes: int
    """Of the dtype."""

    compute_units: int | None
    """Multiprocessors; None: sizes do not matter."""

    source: str
    """Where the fraction of peak comes from."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Fraction:
    value: float
    source: str


_H100 = "800 of 989 TFLOP/s in a product of 8192^3 on an H100 SXM, waves left out"
_DECLARED = _Fraction(value=1.0, source="a declared peak is what it gives")
_FRACTIONS = {
    ("nvidia", "bfloat16"): _Fraction(value=0.85, source=_H100),
    ("nvidia", "float16"): _Fraction(value=0.85, source=f"as bfloat16: {_H100}"),
    ("nvidia", "tf32"): _Fraction(value=0.85, source=f"as bfloat16: {_H100}"),
    ("nvidia", "float32"): _Fraction(
        value=0.9, source="single-precision products on V100 and A100, cuBLAS"
    ),
    ("cpu", "float32"): _DECLARED,
    ("cpu", "bfloat16"): _DECLARED,
}
_SHARED_LANES = (
    "ampere-ga102", "ampere-a10g", "ampere-geforce", "ada", "blackwell-geforce"
)  # fmt: skip
_SHARED = _Fraction(
    value=0.65, source="half of its float32 lanes are the integers' too (GA102)"
)
_PER_WATT = {
    ("turing", "tensor"): 0.5e12,
    ("turing", "float32"): 0.07e12,
    ("ada", "tensor"): 1.25e12,
    ("ada", "float32"): 0.2e12,
    ("hopper", "tensor"): 1.25e12,
    ("hopper", "float32"): 0.2e12,
}
"""Most operations a joule buys: a card of little board power never holds the clock its
peak is quoted at. From a T4 (70 W, 65 TFLOP/s by name), an L4 (72 W, 121) and an H100
NVL (400 W, 835), which Cephalo's tables show at 0.6 to 0.8 of what their peaks say;
cards of more power for their peak are not touched."""
_ASSUMED = _Fraction(value=0.6, source="assumed: nothing was measured")
_ATTENTION = (0.45, 0.35)
"""Of peak: cuDNN's attention with heads of 128 at 2048 positions, forward and backward
(FlashAttention-3, figures 5 and 6: 400 to 450 and 300 to 350 of 989 on an H100)."""


@functools.lru_cache(maxsize=256)
def rate(profile: DeviceProfile, dtype: str) -> Rate:
    """What a kind sustains when it computes in a dtype it has.

    float32 products run in tf32 where the kind has it: JAX's default precision.
    """
    assert dtype in profile.native_dtypes, f"{profile.kind} does not compute in {dtype}"
    peaks = profile.dense_flops_per_s
    unit = "tf32" if dtype == "float32" and "tf32" in peaks else dtype
    fraction = _FRACTIONS.get((profile.vendor, unit), _ASSUMED)
    if unit == "float32" and profile.architecture.startswith(_SHARED_LANES):
        fraction = _SHARED
    sustained = min(peaks[unit] * fraction.value, _by_power(profile, unit))
    # What power takes from products, it takes from attention.
    forward, backward = (share * sustained / fraction.value for share in _ATTENTION)
    return Rate(
        flops_per_s=sustained,
        attention_flops_per_s=(forward, backward),
        memory_bytes_per_s=profile.memory_bytes_per_s * MEMORY_FRACTION,
        item_bytes=ITEM_BYTES[dtype],
        compute_units=profile.compute_units if profile.vendor != "cpu" else None,
        source=fraction.source,
    )


def product_share(profile: DeviceProfile, dtype: str) -> tuple[float, float, str]:
    """A kind's peak in products, the share of it that it is taken to sustain, and where
    that comes from."""
    peaks = profile.dense_flops_per_s
    unit = "tf32" if dtype == "float32" and "tf32" in peaks else dtype
    found = rate(profile, dtype)
    share = found.flops_per_s / peaks[unit]
    fraction = _FRACTIONS.get((profile.vendor, unit), _ASSUMED)
    by_power = share < fraction.value and found.source == fraction.source
    source = f"{found.source}; less by its board power" if by_power else found.source
    return peaks[unit], share, source


def defaults() -> Iterator[str]:
    """The shares of peaks that kinds are taken to sustain, with their sources."""
    for (vendor, dtype), fraction in _FRACTIONS.items():
        yield f"{vendor}, products in {dtype}: {fraction.value:.2f} ({fraction.source})"
    yield f"float32 lanes shared with integers: {_SHARED.value:.2f} ({_SHARED.source})"
    yield f"all other products: {_ASSUMED.value:.2f} ({_ASSUMED.source})"
    yield f"memory: {MEMORY_FRACTION:.2f} ({MEMORY_SOURCE})"


def _by_power(profile: DeviceProfile, unit: str) -> float:
    """Most operations a second its board power allows; infinite where none is known."""
    family = profile.architecture.split("-")[0]
    a_joule = _PER_WATT.get((family, "float32" if unit == "float32" else "tensor"))
    if a_joule is None or profile.tdp_w is None:
        return math.inf
    share = 0.5 if unit == "tf32" else 1.0  # twice the bytes an operand
    return profile.tdp_w * a_joule * share
