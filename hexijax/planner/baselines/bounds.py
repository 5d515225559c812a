"""What no plan of a draft can be faster than, without settling its layers.

    draft -> Bounds.draft_s (any microbatch size), Bounds.size_s (one of them)

A device set needs the sum of its layers' times; a pipeline can at best divide all
layers so that its stages are equal, and fills at best as fast as its fastest stage.
"""

from collections.abc import Mapping, Sequence

from hexijax.costs.compute import layer_times
from hexijax.layers.chain import Chain
from hexijax.planner.baselines.devices import Mesh, Pipeline
from hexijax.planner.baselines.draft import Batch, Layers, Rules, unit
from hexijax.planner.baselines.runs import of_one_lane
from hexijax.planner.baselines.shares import num_microbatches, weight
from hexijax.planner.baselines.ways import Classes, Key

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Samples of a lane among which the best rate is sought."""


class Bounds:
    """Bounds for one chain and batch."""

    def __init__(self, chain: Chain, batch_size: int) -> None:
        self._chain, self._batch_size = chain, batch_size
        self._whole_s: dict[tuple[int, int], float] = {}
        self._sample_s: dict[int, float] = {}

    def sample_s(self, mesh: Mesh) -> float:
        """Least seconds of a sample through all layers on a mesh's single lane."""
        if mesh.key not in self._sample_s:
            self._sample_s[mesh.key] = min(self.whole_s(mesh, n) / n for n in SIZES)
        return self._sample_s[mesh.key]

    def whole_s(self, mesh: Mesh, samples: int) -> float:
        """Seconds of a lane's microbatch through all layers, nothing recomputed."""
        key = (mesh.key, samples)
        if key not in self._whole_s:
            times = layer_times(self._chain, of_one_lane(mesh.shape), samples)
            self._whole_s[key] = sum(time.total_s() for time in times)
        return self._whole_s[key]

    def draft_s(self, rules: Rules, classes: Classes) -> float:
        """Rough seconds of a step in which no device of a replica ever waits."""
        if rules.batch is not Batch.EVEN:
            rate = sum(
                count * sum(self._rates(pipeline))
                for pipeline, count in classes.values()
            )
            return self._batch_size / rate
        units = sum(unit(pipeline) * count for pipeline, count in classes.values())
        return max(
            self._batch_size * unit(pipeline) / units / self._even_rate(rules, pipeline)
            for pipeline, _ in classes.values()
        )

    def size_s(
        self, rules: Rules, classes: Classes, sizes: Mapping[Key, Sequence[int]]
    ) -> float:
        """The same for one microbatch size of each class, filling included."""
        wholes = {key: sizes[key][0] * unit(p) for key, (p, _) in classes.items()}
        weights = {
            key: weight(rules, p, wholes[key]) for key, (p, _) in classes.items()
        }
        total = sum(weights[key] * count for key, (_, count) in classes.items())
        each_s = {
            key: [self.whole_s(mesh, wholes[key] // mesh.lanes) for mesh in pipeline]
            for key, (pipeline, _) in classes.items()
        }
        if rules.is_common_split:
            slowest_s = list(map(max, zip(*each_s.values(), strict=True)))
            each_s = dict.fromkeys(each_s, slowest_s)
        return max(
            min(each_s[key])
            + (num_microbatches(self._batch_size * weights[key] / total, whole) - 1)
            / sum(1 / seconds for seconds in each_s[key])
            for key, whole in wholes.items()
        )

    def _rates(self, pipeline: Pipeline) -> list[float]:
        return [mesh.lanes / self.sample_s(mesh) for mesh in pipeline]

    def _even_rate(self, rules: Rules, pipeline: Pipeline) -> float:
        """Samples per second of one replica."""
        rates = self._rates(pipeline)
        even = rules.layers is Layers.EVEN
        return len(rates) * min(rates) if even else sum(rates)
