"""What an accelerator's program has alive beside what it is given and returns.

    Chain, Layer, Remat -> Working, ... -> most_forward | most_apart | most_joined

Read off XLA:GPU's buffer assignments. What is element-wise is made again inside the
kernels that need it, so a backward holds what products read and make, and cotangents of
that. It works on one layer at a time, from the last to the first. A weight's gradient
may wait until it is added: XLA counts the sum in float32 as more memory than the
bfloat16 gradient whose life it ends, and puts it off, unless one kernel does both.
"""

import dataclasses
from collections.abc import Sequence

from hexijax.cluster import DeviceProfile
from hexijax.costs.compute import border_bytes_in
from hexijax.costs.rates import SPLIT_SHARE
from hexijax.layers.chain import ITEM_BYTES, Chain, Layer, Product, Remat
from hexijax.plan.plan import Stage

SCORE_BYTES = 4
"""Of an attention score that is written out: softmax is float32."""

SCORE_ARRAYS = 3
"""Of that size at once beside what was kept: cotangents of the probabilities, of the
scores, and those laid out for the product that takes them next. Where the scores were
made again, one of the three overwrites them."""

SCRATCH_BYTES = 33 * 2**20
"""What XLA hands a matrix library on Hopper and newer cards, a tenth of it on older
ones, and float32 sums of rows."""

ALL_LAYERS = 2**20

ADDS_AT_ONCE = (8, 0)
"""The least compute capability on which XLA fuses products with what follows them."""


def waiting_layers(profile: DeviceProfile) -> int:
    """Layers whose gradients may be alive at once: one made and one being added, or all
    where a kernel of its own adds each."""
    capability = profile.compute_capability
    if profile.vendor != "nvidia" or capability is None:
        return ALL_LAYERS
    version = tuple(map(int, capability.split(".")))
    return 2 if version >= ADDS_AT_ONCE else ALL_LAYERS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Working:
    """One layer under its remat policy, for a lane's microbatch, in bytes."""

    kept: int
    """From the forward to the backward where both are one program."""

    apart: int
    """While its backward runs and the forward was another program."""

    joined: int
    """While its backward runs in one program with the forward, ``kept`` left out."""

    early: int
    """Made again before its turn: nothing keeps ``dots`` from it."""

    grads: int
    """Gradients of its weights in the compute dtype."""

    @classmethod
    def of(
        cls,
        chain: Chain,
        layers: Sequence[Layer],
        index: int,
        policy: Remat,
        dtype: str,
        tensor: int,
        samples: int,
    ) -> "Working":
        """Of one of the chain's layers on its kind, on one device of its mesh."""
        layer, border = layers[index], layers[index - 1].border_bytes if index else 0
        share = 1 - SPLIT_SHARE + SPLIT_SHARE / tensor

        def here(num_bytes: float) -> int:
            return int(border_bytes_in(chain, int(num_bytes * samples), dtype) * share)

        read = float(layer.joined_bytes)
        kept = min(read, layer.activation_bytes[policy])
        widest, made, taken = _widest(layer, ITEM_BYTES[chain.dtype])
        cotangents, new = made + taken, 1  # others overwrite what was made again
        if widest < (scores := _score_bytes(layer)):
            widest, cotangents, new = scores, SCORE_ARRAYS, SCORE_ARRAYS - 1
        elif made == taken == 1:
            # An activation's derivative shares its exponentials and is made beside it;
            # that of a gate is made again with the other half's.
            read += widest
        widest = widest or read  # of a layer whose products nobody counted
        match policy:
            case Remat.NONE:
                again = early = 0.0
            case Remat.DOTS:  # a layer's widest array is made where it is needed
                again = min(widest, read - kept)
                early = read - kept - again
            case Remat.FULL:
                again, early, cotangents = read - kept, 0.0, new
        if policy is not Remat.FULL:
            kept, new = read, 1  # one program need not recompute, and XLA does not
        trained = (p for p in layer.products if p.shared and p.back > 1)
        weights = sum(p.inner * p.columns * p.count for p in trained)
        return cls(
            kept=here(kept),
            apart=here(again + cotangents * widest + 2 * border),
            joined=here(read - kept + new * widest + border),
            early=here(early),
            grads=int(weights * ITEM_BYTES[dtype] / tensor),
        )


def working(
    chain: Chain, layers: Sequence[Layer], stage: Stage, samples: int, segment: int
) -> list[Working]:
    """Of a segment's layers."""
    start, stop = stage.segment_layers(segment)
    policies = stage.remat[start - stage.layers[0] : stop - stage.layers[0]]
    return working_of(
        chain, layers, policies, stage.dtype, stage.tensor, samples, start
    )


def working_of(
    chain: Chain,
    layers: Sequence[Layer],
    policies: Sequence[Remat],
    dtype: str,
    tensor: int,
    samples: int,
    start: int = 0,
) -> list[Working]:
    """Of as many layers as there are policies; equal ones are made once."""
    made: dict[object, Working] = {}
    found: list[Working] = []
    for i, policy in enumerate(policies, start):
        border = layers[i - 1].border_bytes if i else 0
        key = (layers[i].signature, border, policy)
        if key not in made:
            made[key] = Working.of(chain, layers, i, policy, dtype, tensor, samples)
        found.append(made[key])
    return found


def _widest(layer: Layer, item_bytes: int) -> tuple[float, int, int]:
    """The largest array of one sample that a product of a weight reads or makes, and
    how many make such and read such."""
    weights = [p for p in layer.products if p.shared and not p.fused]
    taken = [float(p.rows * p.inner * item_bytes) for p in weights]
    made = [
        float(p.rows * p.columns * item_bytes)
        for p in weights
        for _ in range(max(1, round(p.count)))
    ]
    widest = max([*made, *taken], default=0.0)
    return widest, made.count(widest), taken.count(widest)


def _score_bytes(layer: Layer) -> float:
    """Attention's scores of one sample, where no fused kernel hides them."""
    sizes = (p.count * p.rows * p.columns for p in layer.products if _is_scores(p))
    return SCORE_BYTES * max(sizes, default=0.0)


def _is_scores(product: Product) -> bool:
    return not (product.shared or product.fused)


def most_forward(layers: Sequence[Working]) -> int:
    """The most of a forward of its own: no more than a layer's backward makes."""
    return max(layer.apart + layer.early for layer in layers) + SCRATCH_BYTES


def most_apart(layers: Sequence[Working], waiting: int) -> int:
    """The most of a backward of its own, the last layer's gradients made first.

    ``waiting``: layers whose gradients are still to be added.
    """
    most = early = 0
    for i, layer in enumerate(layers):
        early += layer.early
        most = max(most, early + layer.apart + _grads(layers, i, waiting))
    return most + SCRATCH_BYTES


def most_joined(
    layers: Sequence[Working], waiting: int, handed: Sequence[int] = ()
) -> int:
    """The most of a program of both directions.

    ``handed``: of each layer, what its weight part waits with: counted as there, and
    not made yet while later layers are at work.
    """
    most = kept = later = 0
    for i, layer in enumerate(layers):
        kept += layer.kept
        most = max(most, kept + layer.joined + _grads(layers, i, waiting) - later)
        later += handed[i] if handed else 0
    return most + SCRATCH_BYTES


def _grads(layers: Sequence[Working], at: int, waiting: int) -> int:
    return sum(layer.grads for layer in layers[at : at + waiting])
