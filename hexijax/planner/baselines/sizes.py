"""Which microbatch sizes and segment lengths are tried."""

from collections.abc import Sequence

from hexijax.planner.baselines.devices import Pipeline
from hexijax.planner.baselines.draft import Batch, Rules, unit
from hexijax.planner.baselines.ways import Classes, Key
from hexijax.planner.options import PlanOptions

OVERLAPPED = 4
"""Layers of a segment where gradients are summed beside the backward."""

MOST_SIZES = 64
"""Samples of a microbatch up to which more than doubles are tried where any will do."""

FINENESS = 8
"""Sizes between one and its double."""


class Sizes:
    """Sizes for a global batch under someone's options."""

    def __init__(self, batch_size: int, options: PlanOptions) -> None:
        self._batch_size = batch_size
        self._cap = options.max_microbatch_size
        self._per_segment = options.layers_per_segment

    def segments(self, members: int) -> Sequence[int | None]:
        """Most layers of a segment, the fewest calls first."""
        if self._per_segment is not None:
            return [self._per_segment]
        return [None, OVERLAPPED, 1] if members == 1 else [OVERLAPPED, 1]

    def shared(self, rules: Rules, classes: Classes) -> Sequence[int | None]:
        """One for all lanes, doubling up to a replica's whole part of an even batch.

        None alone where each replica has its own.
        """
        if rules.batch is Batch.TIMES:
            return [None]
        units = {key: unit(pipeline) for key, (pipeline, _) in classes.items()}
        total = sum(units[key] * count for key, (_, count) in classes.items())
        most = max(-(-self._batch_size // total), 1)
        if self._cap is not None:
            widest = max(
                units[key] // min(mesh.lanes for mesh in pipeline)
                for key, (pipeline, _) in classes.items()
            )
            most = min(most, self._cap // widest)
        sizes = {2**k for k in range(max(most, 0).bit_length())}
        return sorted({*sizes, most} - {0})

    def own(
        self, rules: Rules, classes: Classes, size: int | None
    ) -> dict[Key, list[int]]:
        """Those of each class of pipelines: its part of the shared one, or all."""
        if size is None:
            return {key: self._alone(rules, p) for key, (p, _) in classes.items()}
        if rules.batch is not Batch.FLOPS_SIZES:
            return {key: [size] for key in classes}
        speeds = {key: _lane_flops_per_s(p) for key, (p, _) in classes.items()}
        slowest = min(speeds.values())
        return {
            key: [max(1, round(size * speed / slowest))]
            for key, speed in speeds.items()
        }

    def _alone(self, rules: Rules, pipeline: Pipeline) -> list[int]:
        most = -(-self._batch_size // unit(pipeline))
        if self._cap is not None:
            lanes = min(mesh.lanes for mesh in pipeline)
            most = min(most, self._cap * lanes // unit(pipeline))
        doubling = {2**k for k in range(most.bit_length())}
        if not rules.any_size:
            return sorted(doubling)
        fine = {
            n
            for double in doubling
            for n in range(double, 2 * double, max(double // FINENESS, 1))
            if n <= min(most, MOST_SIZES)
        }
        return sorted(doubling | fine)


def _lane_flops_per_s(pipeline: Pipeline) -> float:
    return sum(mesh.peak_flops_per_s for mesh in pipeline) / unit(pipeline)
