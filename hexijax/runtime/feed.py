"""The global batch of the step at hand: what each stage reads of it, and its weight.

    batch, step -> Feed.begin -> weight; then Feed.load: a microbatch, on a stage

The map from samples to microbatches and the random keys are ``batches``'; here they
meet the arrays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from hexijax.layers.segment import KEYS, Segment
from hexijax.layers.trace import TracedModel
from hexijax.plan.plan import Place, stage_place
from hexijax.runtime.batches import (
    cut_short,
    host_device,
    sample_keys,
    sample_map,
    take,
)
from hexijax.runtime.layout import Layout
from hexijax.runtime.memo import memo
from hexijax.runtime.segments import lane_arrays


class Feed:
    """Hands a batch out.

    Args:
      layout: the plan, its chain and its devices.
      segments: by stage and number; what they read is what is handed out.
      traced: the model as a stage computes it, which weighs its samples.
      seed: random keys follow from it.
    """

    def __init__(
        self,
        layout: Layout,
        segments: Mapping[tuple[Place, int], Segment],
        traced: Callable[[Place], TracedModel],
        seed: int,
    ):
        self._layout, self._segments = layout, segments
        self._traced, self._seed = traced, seed
        self._keyed = any(KEYS in segment.batch for segment in segments.values())
        self._all_rows = self._rows = sample_map(layout.plan)
        self._batch: Mapping[str, np.ndarray] = {}

    def begin(self, batch: Mapping[str, np.ndarray], step: int) -> float:
        """Takes a global batch; returns its weight, known before any backward."""
        size, given = self._layout.plan.batch_size, len(next(iter(batch.values())))
        self._batch, self._rows = batch, self._all_rows
        if given < size:
            self._rows = cut_short(self._all_rows, given)
        if self._keyed:
            self._batch = {**batch, KEYS: sample_keys(self._seed, step, size)}
        return sum(self.weight(r, m) for r, m in self._rows)

    def weight(self, replica: int, microbatch: int) -> float:
        """Of the samples of a microbatch; padding has none."""
        stages = self._layout.plan.replicas[replica].stages
        rows, lanes = self._rows[replica, microbatch], stages[-1].lanes
        names = self._layout.chain.batch
        arrays = take({k: self._batch[k] for k in names}, rows)
        laned = {k: arrays[k].reshape(lanes, -1, *arrays[k].shape[1:]) for k in names}
        last = stage_place(replica, len(stages) - 1)
        with jax.default_device(host_device()):
            per_sample = np.asarray(self._weigher(last)(laned), np.float64)
        real = rows.mask if per_sample.size == rows.mask.size else 1.0
        return float((per_sample.reshape(-1) * real).sum())

    def load(self, replica: int, microbatch: int, place: Place) -> dict[str, jax.Array]:
        """What a stage reads of a microbatch, on its mesh."""
        wanted = self._names(place)
        batch = {k: v for k, v in self._batch.items() if k in wanted}
        arrays = take(batch, self._rows[replica, microbatch])
        return lane_arrays(
            self._layout, place, {k: v for k, v in arrays.items() if k in wanted}
        )

    @memo
    def _weigher(self, last: Place) -> Callable[..., Any]:
        return jax.jit(jax.vmap(self._traced(last).weight))

    @memo
    def _names(self, place: Place) -> frozenset[str]:
        """Batch arrays that a stage reads, keys and mask among them."""
        segments = (s for (at, _), s in self._segments.items() if at == place)
        return frozenset(name for segment in segments for name in segment.batch)
