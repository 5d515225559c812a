"""What an engine gives and takes: its whole state by slices.

    engine.slices() -> {Slice: arrays where they lie} -> snapshot, sources
    {Slice: arrays like engine.targets()} -> engine.load

A parameter's state lies in boxes that tile it; the boxes follow from the plan, the
names do not. What is the whole engine's, such as a step count or a loss scale, has no
name and one kind; each copy that the engine keeps of it is listed.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hexijax.weights.slices import MASTER, Key, Slice, whole_slice
from hexijax.weights.source import Tensor

if TYPE_CHECKING:
    import jax

    from hexijax.weights.stored.manifest import Param

__all__ = ["MASTER", "Key", "Slice", "Stateful", "Tensor", "whole_slice"]


@runtime_checkable
class Stateful(Protocol):
    """An engine, as far as saving, moving and recovering its state go."""

    def slices(self) -> "Mapping[Slice, Sequence[jax.Array]]":
        """Every state array, of one whole step; several where there are copies.

        The arrays are the engine's own: the next step's update overwrites them.
        """
        ...

    def targets(self) -> "Mapping[Slice, Sequence[jax.ShapeDtypeStruct]]":
        """Shape, dtype and sharding of each of them; known before there is a state."""
        ...

    def tensors(self) -> Mapping[Key, Tensor]:
        """Shape and dtype of the whole arrays that the slices are boxes of."""
        ...

    def load(self, arrays: "Mapping[Slice, Sequence[jax.Array]]") -> None:
        """Takes arrays that are as ``targets`` says; they are the engine's from now."""
        ...

    def stored_params(self) -> "list[Param]":
        """Where each parameter is in the model's tree."""
        ...
