"""The model as the planner sees it: layers in order, with their costs per sample.

    loss, params, batch -> trace_model -> Chain (this file) -> planner, plan, program

Data only: no JAX here, so a chain loads and plans on any machine. All figures are per
sample (one row of the batch) unless the field says otherwise.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from hexijax.layers.layer import Layer, Product, Remat

__all__ = [
    "ITEM_BYTES",
    "Array",
    "Chain",
    "Group",
    "Layer",
    "Leaf",
    "Product",
    "Remat",
]

FORMAT_VERSION = 3

READ_VERSIONS = (2, 3)
"""Before 3 every parameter trained."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4,
    "uint32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A parameter, or one layer's row of a parameter stacked over layers."""

    name: str
    """Global name: the path in the user's parameter tree, joined by '/'."""

    shape: tuple[int, ...]
    """Shape as the runtime holds it; a row of a stacked array keeps its leading 1."""

    dtype: str = "float32"
    """Dtype of the master copy."""

    row: int | None = None
    """Index along dim 0 of the stacked array this leaf is a row of, if it is one."""

    tensor_dim: int | None = None
    """Dim split over the ``model`` axis at tensor degree > 1; None: held whole."""

    trainable: bool = True
    """Whether it has a gradient and is updated; else it is read, and stays as it is."""

    @functools.cached_property
    def id(self) -> str:
        """Unique name: ``blocks/mlp/kernel[3]`` for row 3 of a stacked array."""
        return self.name if self.row is None else f"{self.name}[{self.row}]"

    @functools.cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPart(Leaf):
    """Some rows of a leaf that is too large to come and go at once: a leaf of its own
    to all but a segment, which computes with the whole."""

    whole: Leaf
    """What it is a part of."""

    dim: int
    """Along which the leaf is cut."""

    start: int
    """The first of its rows there."""

    @functools.cached_property
    def id(self) -> str:
        """Unique name: ``embed/table 0/500`` for the rows from 500 along dim 0."""
        return f"{self.whole.id} {self.dim}/{self.start}"


def whole_leaf(leaf: Leaf) -> Leaf:
    """What a leaf is a part of, or itself."""
    return leaf.whole if isinstance(leaf, LeafPart) else leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Leaves used by exactly the same layers: the unit of reduce, update and gather."""

    name: str
    """Name of the first layer that uses it; a tied leaf is its own group."""

    leaves: tuple[Leaf, ...]
    """In the order of their first use."""

    layers: tuple[int, ...]
    """Indices of the layers that use it, ascending; more than one means tied."""

    def __post_init__(self) -> None:
        kinds = {leaf.trainable for leaf in self.leaves}
        assert len(kinds) <= 1, f"{self.name}: all of its leaves train, or none"

    @functools.cached_property
    def trainable(self) -> bool:
        """Whether its leaves train."""
        return all(leaf.trainable for leaf in self.leaves)

    @functools.cached_property
    def size(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in self.leaves)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """Shape and dtype of one array of one sample."""

    shape: tuple[int, ...]
    """Shape with the sample dim left out."""

    dtype: str
    """NumPy name of the dtype."""

    rows: int | None = dataclasses.field(default=None, compare=False)
    """Of the parameter that its numbers pick rows of; None: none that is known."""

    picks: str = dataclasses.field(default="", compare=False)
    """Name of that parameter."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one sample's array."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The layers in order and the parameters they use."""

    name: str
    """Name of the model, for people."""

    layers: tuple[Layer, ...]
    """In the order of the forward."""

    groups: tuple[Group, ...]
    """In the order of their first use."""

    batch: Mapping[str, Array]
    """The batch arrays the loss reads, by name, without the sample dim."""

    dtype: str = "float32"
    """Compute dtype it was traced with: the dtype of most matrix-product operands."""

    notes: tuple[str, ...] = ()
    """What could not be cut, and other things a person should know."""

    tokens_per_sample: int = 1
    """Tokens in a sample, for people: rates are given in tokens."""

    def __post_init__(self) -> None:
        known = {group.name for group in self.groups}
        assert len(known) == len(self.groups), "group names are unique"
        assert all(name in known for layer in self.layers for name in layer.groups)

    def layers_under(self, *, fused_attention: bool) -> tuple[Layer, ...]:
        """The layers as a kind with or without fused attention runs them."""
        return tuple(x.under(fused_attention=fused_attention) for x in self.layers)

    def group(self, name: str) -> Group:
        """The group of that name."""
        return next(group for group in self.groups if group.name == name)

    @property
    def num_params(self) -> int:
        """Parameters of the model; a tied array counts once."""
        return sum(group.size for group in self.groups)

    @property
    def num_trained(self) -> int:
        """Of them, those that train."""
        return sum(group.size for group in self.groups if group.trainable)

    @property
    def first_trained(self) -> int:
        """The first layer that uses a parameter that trains; no gradient goes further.

        The number of layers where nothing trains.
        """
        used = (group.layers[0] for group in self.groups if group.trainable)
        return min(used, default=len(self.layers))

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that do not train."""
        return frozenset(leaf.name for leaf in self.leaves() if not leaf.trainable)

    def leaves(self) -> tuple[Leaf, ...]:
        """Every leaf once, in the order of first use."""
        return tuple(leaf for group in self.groups for leaf in group.leaves)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; ``from_json`` undoes it exactly."""
        return {"version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Chain":
        """The chain that ``to_json`` wrote.

        Raises:
          ValueError: the format version is not this one's.
        """
        if data.get("version") not in READ_VERSIONS:
            known = " and ".join(map(str, READ_VERSIONS))
            raise ValueError(
                f"The chain has format version {data.get('version')!r}; this hexijax "
                f"reads versions {known}. Plan again to write a new one."
            )

        def leaf(d: Mapping[str, Any]) -> Leaf:
            fields: dict[str, Any] = {**d, "shape": tuple(d["shape"])}
            return Leaf(**fields)

        def group(d: Mapping[str, Any]) -> Group:
            leaves = tuple(map(leaf, d["leaves"]))
            return Group(name=d["name"], leaves=leaves, layers=tuple(d["layers"]))

        return cls(
            name=data["name"],
            layers=tuple(map(Layer.from_json, data["layers"])),
            groups=tuple(map(group, data["groups"])),
            batch={
                k: Array(
                    shape=tuple(v["shape"]),
                    dtype=v["dtype"],
                    rows=v.get("rows"),
                    picks=v.get("picks", ""),
                )
                for k, v in data["batch"].items()
            },
            dtype=data["dtype"],
            notes=tuple(data["notes"]),
            tokens_per_sample=data.get("tokens_per_sample", 1),
        )

    def fingerprint(self) -> str:
        """Twelve hex digits of what a plan depends on: names, shapes, the order, and
        which parameters train.

        Costs are left out: another JAX version counts FLOPs a little differently, and
        the plan stays valid.
        """
        facts: list[Any] = [
            [(layer.name, layer.groups) for layer in self.layers],
            [
                [(leaf.id, leaf.shape, leaf.dtype) for leaf in g.leaves]
                for g in self.groups
            ],
            sorted((k, v.shape, v.dtype) for k, v in self.batch.items()),
        ]
        if self.frozen:
            facts.append(sorted(self.frozen))
        return _digest(json.dumps(facts))


@functools.lru_cache(maxsize=64)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
