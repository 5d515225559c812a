"""Seconds of a layer's forward and backward on one kind of mesh.

    Chain, MeshShape, samples a lane -> layer_times -> (LayerTime, ...)

A layer takes its arithmetic or its memory traffic, whichever is longer, plus what its
tensor-parallel products must exchange. All lanes run at once, so their number does not
enter.
"""

import dataclasses

from hexijax.cluster import DeviceProfile, LinkProfile
from hexijax.costs.links import all_reduce_s
from hexijax.costs.measured import measured_s, missing
from hexijax.costs.rates import RECOMPUTE_FRACTION, Rate, rate
from hexijax.layers.chain import ITEM_BYTES, Chain, Layer, Remat
from hexijax.layers.layer import FUSED_DTYPES

ALL_REDUCES_A_PASS = 2
"""A layer split by columns then rows sums its output twice a pass: after attention and
after the feed-forward (Megatron's count)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """What costs need to know of a stage's mesh; equal meshes cost the same."""

    profile: DeviceProfile
    """Its kind."""

    dtype: str
    """Compute dtype."""

    lanes: int = 1
    """Data-parallel copies."""

    tensor: int = 1
    """Tensor degree."""

    link: LinkProfile | None = None
    """The slowest link inside it; None: a single device."""

    usable_memory_bytes: int = 0
    """Of its smallest device."""

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.lanes * self.tensor

    @property
    def fused_attention(self) -> bool:
        """Whether attention is cuDNN's fused kernel."""
        return fused_attention(self.profile, self.dtype)

    @property
    def rate(self) -> Rate:
        """What one of its devices sustains."""
        return rate(self.profile, self.dtype)


def fused_attention(profile: DeviceProfile, dtype: str) -> bool:
    """Whether the runtime asks for cuDNN's fused attention: its kinds and dtypes."""
    return profile.has_cudnn_attention and dtype in FUSED_DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Seconds of one layer for one microbatch."""

    forward_s: float
    """The forward."""

    backward_s: float
    """The backward, without recomputation."""

    recompute_s: dict[Remat, float]
    """What each remat policy adds to the backward."""

    def total_s(self, policy: Remat = Remat.NONE) -> float:
        """Forward, backward and recomputation."""
        return self.forward_s + self.backward_s + self.recompute_s[policy]


def layer_times(chain: Chain, mesh: MeshShape, samples: int) -> tuple[LayerTime, ...]:
    """The times of every layer for a microbatch of ``samples`` a lane."""
    layers = chain.layers_under(fused_attention=mesh.fused_attention)
    return tuple(_layer_time(chain, layer, mesh, samples) for layer in layers)


def missing_times(chain: Chain, mesh: MeshShape) -> str | None:
    """Why some layer cannot be priced on a mesh; None where all can."""
    layers = chain.layers_under(fused_attention=mesh.fused_attention)
    signatures = dict.fromkeys(layer.signature for layer in layers)
    faults = (missing(mesh.profile, s, mesh.dtype, mesh.tensor) for s in signatures)
    return next((fault for fault in faults if fault), None)


def _layer_time(chain: Chain, layer: Layer, mesh: MeshShape, samples: int) -> LayerTime:
    known = measured_s(mesh.profile, layer.signature, mesh.dtype, mesh.tensor, samples)
    if known:
        forward_s, backward_s = known
    else:
        forward_s, backward_s = _roofline_s(chain, layer, mesh, samples)
        exchange_s = _exchange_s(chain, layer, mesh, samples)
        forward_s, backward_s = forward_s + exchange_s, backward_s + exchange_s
    return LayerTime(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s={
            policy: fraction * forward_s
            for policy, fraction in RECOMPUTE_FRACTION.items()
        },
    )


def _roofline_s(
    chain: Chain, layer: Layer, mesh: MeshShape, samples: int
) -> tuple[float, float]:
    """Forward and backward; adding to the gradients is traffic of its own kernels."""
    rate, tensor = mesh.rate, mesh.tensor
    num_params = sum(chain.group(name).size for name in layer.groups) / tensor
    weight_bytes = num_params * ITEM_BYTES[mesh.dtype]
    scale = ITEM_BYTES[mesh.dtype] / ITEM_BYTES[chain.dtype]
    moved = samples * scale / tensor
    forward_s = rate.seconds(
        layer.forward_flops * samples / tensor,
        layer.forward_bytes * moved + weight_bytes,
    )
    backward_s = rate.seconds(
        layer.backward_flops * samples / tensor,
        layer.backward_bytes * moved + 2 * weight_bytes,
    )
    accumulate_s = num_params * 8 / rate.memory_bytes_per_s
    return forward_s, backward_s + accumulate_s


def _exchange_s(chain: Chain, layer: Layer, mesh: MeshShape, samples: int) -> float:
    """Sums over the ``model`` axis in one pass."""
    if mesh.tensor == 1 or mesh.link is None:
        return 0.0
    split = any(
        leaf.tensor_dim is not None
        for name in layer.groups
        for leaf in chain.group(name).leaves
    )
    if not split:
        return 0.0
    border_bytes = border_bytes_in(chain, layer.border_bytes * samples, mesh.dtype)
    return ALL_REDUCES_A_PASS * all_reduce_s(mesh.link, mesh.tensor, border_bytes)


def border_bytes_in(chain: Chain, num_bytes: int, dtype: str) -> int:
    """Activation bytes as traced, in another compute dtype."""
    return int(num_bytes * ITEM_BYTES[dtype] / ITEM_BYTES[chain.dtype])
