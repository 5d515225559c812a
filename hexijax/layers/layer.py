"""One layer's figures, per sample: what planning knows of a piece of the model.

Data only, no JAX. `figures` reads them off a traced model; formulas may write them too.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

FUSED_DTYPES = ("bfloat16", "float16")
"""What cuDNN's attention computes in."""

BACKWARD_PRODUCTS = 2.5
"""A fused attention's backward over its forward: it makes the scores again, then four
products to the forward's two (FlashAttention-2, section 3.1)."""


class Remat(enum.StrEnum):
    """What a layer keeps from its forward for its backward."""

    NONE = "none"
    """Every intermediate the backward reads."""
    DOTS = "dots"
    """The outputs of matrix products and attention; the rest is recomputed."""
    FULL = "full"
    """The layer's input only; the whole layer is recomputed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Equal matrix products of a forward: rows x inner by inner x columns."""

    rows: int
    """Rows of the left operand that one sample adds."""

    inner: int
    """Dim that is summed over."""

    columns: int
    """Columns of the right operand."""

    count: float = 1.0
    """Products of this shape; half a one is a product of which half is computed."""

    shared: bool = True
    """The right operand is the same for all samples, a weight: more samples are more
    rows. Else they are more products: attention's."""

    fused: bool = False
    """Part of a fused attention kernel: its result never reaches memory."""

    back: int = 2
    """Operands whose gradients its backward makes: both, or the left one alone where
    the right is a weight that does not train, or none where no backward runs."""

    @property
    def flops(self) -> float:
        """Operations for one sample; a multiply-add counts two."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    @property
    def backward_flops(self) -> float:
        """The same of its backward."""
        if self.fused:
            return self.flops * BACKWARD_PRODUCTS if self.back else 0.0
        return self.flops * self.back


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The unit of cutting. Figures are per sample."""

    name: str
    """``embed``, ``blocks/3``, ``head``, ..."""

    signature: str
    """Equal for layers that run the same equations on the same shapes."""

    groups: tuple[str, ...]
    """Names of the parameter groups it reads, tied ones included."""

    batch: tuple[str, ...]
    """Names of the batch arrays it reads, directly or through batch-only values, and
    ``@keys`` where it draws random numbers."""

    forward_flops: float
    """Floating-point operations of the forward; a multiply-add counts two."""

    backward_flops: float
    """The same of the backward, without any recomputation."""

    products: tuple[Product, ...]
    """Matrix products of the forward, equal shapes together; convolutions too."""

    forward_bytes: float
    """Bytes the forward moves between its products, after fusion: each kernel reads
    what it needs and writes what it makes. Operands of the products are not counted."""

    backward_bytes: float
    """The same of the backward."""

    border_bytes: int
    """Activation bytes handed to the next layer; the last layer's is 0."""

    activation_bytes: Mapping[Remat, int]
    """Bytes kept from forward to backward under each remat policy, weights left out,
    where the two are programs of their own. Its input counts where it is read."""

    joined_bytes: int
    """Bytes kept under remat none where both are one program: what products read and
    make. A compiler computes the rest again inside the kernels that need it."""

    border_whole_bytes: int = 0
    """Of ``border_bytes``, integers and keys: they have no cotangent, and the same size
    in every compute dtype."""

    handed_bytes: int | None = None
    """Bytes that the input part of a split backward hands to its weight part; None: not
    known, `costs.activations` has a bound."""

    reads_input: tuple[Remat, ...] = tuple(Remat)
    """Policies under which its backward reads its input as it came."""

    uncast: tuple[str, ...] = ()
    """Ids of leaves it is handed in their own dtype: tables, whose rows are looked up
    before they are cast."""

    backward: bool = True
    """Whether its backward runs: it does not before the first layer whose parameters
    train."""

    fused: "Layer | None" = None
    """The same layer under cuDNN's fused attention, which neither keeps nor moves the
    scores; None: it has no such attention, or cuDNN refuses it."""

    @property
    def weight_share(self) -> float:
        """Of its backward's operations, those of the weight part where it is split."""
        shared = [p for p in self.products if p.shared]
        flops = sum(p.flops for p in shared if p.back > 1)
        if flops:
            return min(flops / self.backward_flops, 1.0)
        return 0.0 if shared else 0.5

    def under(self, *, fused_attention: bool) -> "Layer":
        """The figures on a kind that runs fused attention, or on one that does not."""
        return self.fused or self if fused_attention else self

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Layer":
        """The layer that `dataclasses.asdict` made a dict of."""
        kept = {Remat(k): v for k, v in data["activation_bytes"].items()}
        fields: dict[str, Any] = {
            **data,
            "groups": tuple(data["groups"]),
            "batch": tuple(data["batch"]),
            "reads_input": tuple(map(Remat, data["reads_input"])),
            "uncast": tuple(data["uncast"]),
            "products": tuple(Product(**p) for p in data["products"]),
            "activation_bytes": kept,
            "fused": None if data["fused"] is None else cls.from_json(data["fused"]),
        }
        return cls(**fields)
