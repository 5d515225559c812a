"""Seconds of a layer's forward and backward on one kind of mesh.

    Chain, MeshShape, samples a lane -> layer_times -> (LayerTime, ...)

A layer takes its products, one by one by their shapes, and the memory traffic of the
kernels between them, plus what tensor-parallel products must exchange. All lanes run at
once, so their number does not enter.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping

from hexijax.cluster import DeviceProfile, LinkProfile
from hexijax.costs.links import all_reduce_s
from hexijax.costs.measured import (
    Basis,
    basis,
    measured_s,
    missing,
)
from hexijax.costs.products import backward_s as backward_s_of
from hexijax.costs.products import forward_s as forward_s_of
from hexijax.costs.rates import (
    RECOMPUTE_DOTS,
    RECOMPUTE_FULL,
    RESIDUAL_PASSES,
    SPLIT_SHARE,
    Rate,
    rate,
)
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
    """The forward, in one program with its backward."""

    backward_s: float
    """The backward, without recomputation."""

    weight_s: float
    """Of it, the weight part where it is split."""

    recompute_s: Mapping[Remat, float]
    """What each remat policy adds to the backward."""

    residual_s: Mapping[Remat, tuple[float, float]]
    """What writing and reading residuals adds to forward and backward where they are
    programs of their own."""

    def forward(self, policy: Remat, *, joined: bool) -> float:
        """The forward; ``joined``: in one program with its backward."""
        return self.forward_s + (0.0 if joined else self.residual_s[policy][0])

    def backward(self, policy: Remat, *, joined: bool) -> float:
        """The backward with its recomputation."""
        apart_s = 0.0 if joined else self.residual_s[policy][1]
        return self.backward_s + self.recompute_s[policy] + apart_s

    def added_s(self, policy: Remat, *, joined: bool = False) -> float:
        """What a policy adds to forward and backward."""
        apart_s = 0.0 if joined else sum(self.residual_s[policy])
        return self.recompute_s[policy] + apart_s

    def total_s(self, policy: Remat = Remat.NONE) -> float:
        """Forward, backward and recomputation in one program."""
        return self.forward_s + self.backward_s + self.recompute_s[policy]


def layer_times(chain: Chain, mesh: MeshShape, samples: int) -> tuple[LayerTime, ...]:
    """The times of every layer for a microbatch of ``samples`` a lane.

    Equal layers are priced once, and a mesh and size once for a chain.
    """
    return _layer_times(Same(chain), mesh, samples)


@functools.lru_cache(maxsize=4096)
def _layer_times(same: "Same", mesh: MeshShape, samples: int) -> tuple[LayerTime, ...]:
    chain = same.chain
    layers = chain.layers_under(fused_attention=mesh.fused_attention)
    sizes = {g.name: g.size for g in chain.groups if g.trainable}
    priced: dict[tuple[str, int], LayerTime] = {}
    found = []
    for layer in layers:
        num_params = sum(sizes.get(name, 0) for name in layer.groups)
        key = (layer.signature, num_params)
        if key not in priced:
            priced[key] = _layer_time(chain, layer, num_params, mesh, samples)
        found.append(priced[key])
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A chain as a key: equal to itself alone, so that no field is compared."""

    chain: Chain

    def __hash__(self) -> int:
        return id(self.chain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.chain is self.chain


def time_basis(chain: Chain, mesh: MeshShape, samples: int) -> dict[Basis, int]:
    """How many layers' times were measured, interpolated, extrapolated or reckoned."""
    layers = chain.layers_under(fused_attention=mesh.fused_attention)
    found = collections.Counter(
        basis(mesh.profile, layer.signature, mesh.dtype, mesh.tensor, samples)
        for layer in layers
    )
    return dict(found)


def missing_times(chain: Chain, mesh: MeshShape) -> str | None:
    """Why some layer cannot be priced on a mesh; None where all can."""
    layers = chain.layers_under(fused_attention=mesh.fused_attention)
    signatures = dict.fromkeys(layer.signature for layer in layers)
    faults = (missing(mesh.profile, s, mesh.dtype, mesh.tensor) for s in signatures)
    return next((fault for fault in faults if fault), None)


def _layer_time(
    chain: Chain, layer: Layer, num_params: int, mesh: MeshShape, samples: int
) -> LayerTime:
    known = measured_s(mesh.profile, layer.signature, mesh.dtype, mesh.tensor, samples)
    whole = _reckoned(chain, layer, num_params, mesh, samples)
    if not known:
        return whole
    under, base = next(iter(known.items()))
    # Of a measured forward, the share that remat computes again is the reckoned one.
    scale = base.forward_s / whole.forward_s if whole.forward_s else 0.0
    again = {policy: s * scale for policy, s in whole.recompute_s.items()}
    apart = (
        base.apart_forward_s - base.forward_s,
        base.apart_backward_s - base.backward_s,
    )
    recompute_s = {p: max(0.0, s - again[under]) for p, s in again.items()}
    residual_s = {p: _part_of(apart, whole, p, under) for p in Remat}
    del known[under]
    for policy, of in known.items():
        more_s = of.forward_s + of.backward_s - base.forward_s - base.backward_s
        recompute_s[policy] = max(0.0, more_s)
        residual_s[policy] = (
            max(0.0, of.apart_forward_s - base.forward_s),
            max(0.0, of.apart_backward_s - base.backward_s - recompute_s[policy]),
        )
    return LayerTime(
        forward_s=base.forward_s,
        backward_s=base.backward_s,
        weight_s=base.backward_s * layer.weight_share,
        recompute_s=recompute_s,
        residual_s=residual_s,
    )


def _part_of(
    apart: tuple[float, float], reckoned: LayerTime, policy: Remat, under: Remat
) -> tuple[float, float]:
    """What residuals cost under a policy, of what they were measured to under another:
    as much more or less as is reckoned."""
    forward_s, backward_s = (
        measured * (of / whole if whole else 1.0)
        for measured, of, whole in zip(
            apart,
            reckoned.residual_s[policy],
            reckoned.residual_s[under],
            strict=True,
        )
    )
    return forward_s, backward_s


def _reckoned(
    chain: Chain, layer: Layer, num_params: int, mesh: MeshShape, samples: int
) -> LayerTime:
    """Products by shape, and what kernels between them move, one after another."""
    rate, tensor = mesh.rate, mesh.tensor
    item = ITEM_BYTES[mesh.dtype]
    # A split layer moves its share of the traffic; what no product accounts for, such
    # as all of a layer whose products are not known, runs as the largest products do.
    split = 1 - SPLIT_SHARE + SPLIT_SHARE / tensor
    bytes_s = item / ITEM_BYTES[chain.dtype] * samples / rate.memory_bytes_per_s
    rest_s = samples / tensor / rate.flops_per_s
    counted = [p.flops for p in layer.products]
    back = [p.backward_flops for p in layer.products]
    between_s = layer.forward_bytes * split * bytes_s
    exchange_s = _exchange_s(chain, layer, mesh, samples)
    forward_s = (
        sum(forward_s_of(p, samples, tensor, rate) for p in layer.products)
        + max(0.0, layer.forward_flops - sum(counted)) * rest_s
        + between_s
        + exchange_s
    )
    backward_s = (
        sum(backward_s_of(p, samples, tensor, rate) for p in layer.products)
        + max(0.0, layer.backward_flops - sum(back)) * rest_s
        + layer.backward_bytes * split * bytes_s
        # Gradients are read, and added to accumulators in float32.
        + num_params / tensor * (8 + item) / rate.memory_bytes_per_s
        + exchange_s
    )
    if not layer.backward:
        backward_s = between_s = 0.0

    def residual_s(policy: Remat) -> tuple[float, float]:
        beyond = max(0, layer.activation_bytes[policy] - layer.joined_bytes)
        written, read = (n * beyond * split * bytes_s for n in RESIDUAL_PASSES)
        return written, read

    return LayerTime(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=backward_s * layer.weight_share,
        recompute_s={
            Remat.NONE: 0.0,
            Remat.DOTS: RECOMPUTE_DOTS * between_s,
            Remat.FULL: RECOMPUTE_FULL * forward_s * layer.backward,
        },
        residual_s={policy: residual_s(policy) for policy in Remat},
    )


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
