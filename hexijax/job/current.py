"""An elastic job's engine, whichever it is now."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hexijax.cluster import Cluster
from hexijax.experiment import Batch
from hexijax.job.loop import Result
from hexijax.layers.chain import Chain
from hexijax.runtime.results import Sums

if TYPE_CHECKING:
    import jax

    from hexijax.checkpoint.slices import Key, Slice, Tensor
    from hexijax.job.elastic import Elastic
    from hexijax.runtime.layout import Layout
    from hexijax.weights.stored.manifest import Param


class Current:
    """The engine of now, for a loop and a saver: neither keeps an old one alive."""

    def __init__(self, elastic: "Elastic"):
        self._elastic = elastic

    @property
    def _engine(self) -> Any:
        return self._elastic.machine.engine

    @property
    def cluster(self) -> Cluster:
        """All nodes that may ever take part."""
        return self._elastic.members.whole

    @property
    def devices(self) -> "Mapping[str, jax.Device]":
        """All of their devices."""
        return self._elastic.devices

    @property
    def chain(self) -> Chain:
        """The model."""
        return self._engine.chain

    @property
    def layout(self) -> "Layout":
        """Who drives the devices; of the plan of now."""
        return self._engine.layout

    def step(self, batch: Batch, step: int) -> Result:
        """See ``Trainee``."""
        result: Any = self._elastic.step(batch, step)

        def fetch() -> dict[str, float]:
            self._elastic.check_readable(result.reads)
            return result.fetch()

        return dataclasses.replace(result, fetch=fetch)

    def sums(self, batch: Batch, number: int) -> Sums:
        """See ``Evaluator``."""
        return self._engine.sums(batch, number)

    def init(self) -> None:
        """See ``Engine``."""
        self._engine.init()

    def slices(self) -> "Mapping[Slice, Sequence[jax.Array]]":
        """See ``Stateful``."""
        return self._engine.slices()

    def targets(self) -> "Mapping[Slice, Sequence[jax.ShapeDtypeStruct]]":
        """See ``Stateful``."""
        return self._engine.targets()

    def tensors(self) -> "Mapping[Key, Tensor]":
        """See ``Stateful``."""
        return self._engine.tensors()

    def load(self, arrays: "Mapping[Slice, Sequence[jax.Array]]") -> None:
        """See ``Stateful``."""
        self._engine.load(arrays)

    def stored_params(self) -> "list[Param]":
        """See ``Stateful``."""
        return self._engine.stored_params()
