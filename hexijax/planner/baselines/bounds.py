"""What no plan of a draft can be faster than, without settling its layers.

    draft -> Bounds.sizes_s (of microbatches), Bounds.draft_s (whatever their size)

A device set needs the sum of its layers' times; a pipeline can at best divide all
layers so that its stages are equal, and waits for its borders.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from hexijax.costs.activations import enter_bytes
from hexijax.costs.compute import layer_times
from hexijax.costs.sums import GRAD_BYTES, STATE_BYTES
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.planner.baselines.devices import Mesh, Pipeline
from hexijax.planner.baselines.draft import Layers, Rules, unit
from hexijax.planner.baselines.runs import of_one_lane
from hexijax.planner.baselines.shares import weight
from hexijax.planner.baselines.ways import Classes, Key, Ways
from hexijax.planner.pace import LONGEST_RUN

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Samples of a lane whose times are asked for; between and beyond, lines."""


class Bounds:
    """Bounds for one chain and batch."""

    def __init__(self, chain: Chain, ways: Ways, batch_size: int) -> None:
        self._chain, self._ways, self._batch_size = chain, ways, batch_size
        self._border_bytes = functools.cache(self._least_border)
        self._whole_s: dict[int, Float[np.ndarray, " sizes"]] = {}
        self._sample_s: dict[int, float] = {}
        self._at: dict[tuple[int, tuple[int, ...]], Float[np.ndarray, " sizes"]] = {}

    def sample_s(self, mesh: Mesh) -> float:
        """Least seconds of a sample through all layers on a mesh's single lane."""
        if mesh.key not in self._sample_s:
            self._sample_s[mesh.key] = float((self._wholes_s(mesh) / SIZES).min())
        return self._sample_s[mesh.key]

    def draft_s(self, classes: Classes) -> float:
        """Of a step in which no device of any replica ever waits for another."""
        rate = sum(
            count * sum(mesh.lanes / self.sample_s(mesh) for mesh in pipeline)
            for pipeline, count in classes.values()
        )
        return self._batch_size / rate

    def sizes_s(
        self, rules: Rules, classes: Classes, own: Mapping[Key, Sequence[int]]
    ) -> Float[np.ndarray, " sizes"]:
        """Of a step with each of some microbatch sizes, filling included.

        Args:
          rules: of the draft.
          classes: of its pipelines.
          own: of each class, as many sizes of a microbatch of one lane each.
        """
        wholes = {
            key: tuple(n * unit(pipeline) for n in own[key])
            for key, (pipeline, _) in classes.items()
        }
        weights_N = {
            key: np.array([weight(rules, pipeline, n) for n in wholes[key]])
            for key, (pipeline, _) in classes.items()
        }
        total_N = sum(weights_N[key] * count for key, (_, count) in classes.items())
        each_s = {
            key: np.array(
                [
                    self._at_s(mesh, tuple(n // mesh.lanes for n in wholes[key]))
                    for mesh in pipeline
                ]
            )
            for key, (pipeline, _) in classes.items()
        }
        if rules.is_common_split:
            slowest_s = np.maximum.reduce(list(each_s.values()))
            each_s = dict.fromkeys(each_s, slowest_s)
        even = rules.layers is Layers.EVEN
        worst_N = np.zeros(len(next(iter(wholes.values()))))
        for key, (pipeline, _) in classes.items():
            samples_N = self._batch_size * weights_N[key] / total_N
            counts_N = np.maximum(np.ceil(samples_N / wholes[key] - 1e-9), 1)
            first_N, next_N = self._pace_s(pipeline, each_s[key], wholes[key], even)
            worst_N = np.maximum(worst_N, first_N + (counts_N - 1) * next_N)
        return worst_N

    def _pace_s(
        self,
        pipeline: Pipeline,
        whole_s_KN: Float[np.ndarray, "stages sizes"],
        wholes: tuple[int, ...],
        even: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of the first microbatch and each further one, as ``pace.pipeline_s`` has it.

        Were the stages equal: a run of them turns as many microbatches while one goes
        through it and back, and no stage is shorter than a layer.
        """
        stages = len(pipeline)
        if even:
            first_N = whole_s_KN.mean(axis=0)
            next_N = whole_s_KN.max(axis=0) / stages
        else:
            next_N = 1 / (1 / whole_s_KN).sum(axis=0)
            first_N = next_N * stages
        if stages == 1:
            return first_N, next_N
        sizes = tuple(n * self._border_bytes(pipeline[0].shape.dtype) for n in wholes)
        borders_s_BN = np.array(
            [self._ways.borders_s(a, b, sizes) for a, b in itertools.pairwise(pipeline)]
        )
        there_and_back_N = 2 * borders_s_BN.sum(axis=0)
        if stages <= LONGEST_RUN:
            next_N = next_N + there_and_back_N / stages
        next_N = np.maximum(next_N, borders_s_BN.max(axis=0))
        if stages > 2:  # the first and the last may have no more than a light layer
            layer_s_KN = whole_s_KN[1:-1] / len(self._chain.layers)
            next_N = np.maximum(next_N, layer_s_KN.max(axis=0))
        return first_N + there_and_back_N, next_N

    def _least_border(self, dtype: str) -> int:
        """Bytes of a sample at the narrowest border between two layers."""
        inner = range(1, len(self._chain.layers))
        return min((enter_bytes(self._chain, i, dtype, 1) for i in inner), default=0)

    def _wholes_s(self, mesh: Mesh) -> Float[np.ndarray, " sizes"]:
        """Seconds of a lane's microbatches through all layers, nothing recomputed."""
        if mesh.key not in self._whole_s:
            shape = of_one_lane(mesh.shape)
            self._whole_s[mesh.key] = np.array(
                [
                    sum(time.total_s() for time in layer_times(self._chain, shape, n))
                    for n in SIZES
                ]
            )
        return self._whole_s[mesh.key]

    def _at_s(
        self, mesh: Mesh, samples: tuple[int, ...]
    ) -> Float[np.ndarray, " sizes"]:
        """The same at any sizes."""
        key = (mesh.key, samples)
        if key not in self._at:
            known_s = self._wholes_s(mesh)
            beyond = np.maximum(np.array(samples) / SIZES[-1], 1)
            self._at[key] = np.interp(samples, SIZES, known_s) * beyond
        return self._at[key]


def held_params(
    mesh: Mesh,
    members: int,
    *,
    moments: int | None,
    whole_leaves: bool,
    trained: float = 1.0,
) -> float:
    """Most parameters that a mesh can hold, if nothing else were there.

    Args:
      mesh: of a replica.
      members: replicas, over which state is spread.
      moments: fp32 arrays of the optimizer for each parameter; None: state lies
        elsewhere.
      whole_leaves: state is spread over replicas, not over lanes.
      trained: the share of parameters that train.
    """
    shape = mesh.shape
    item = ITEM_BYTES[shape.dtype]
    each_bytes = (item + GRAD_BYTES * trained) / shape.tensor
    if moments is not None:
        homes = members * (shape.tensor if whole_leaves else shape.num_devices)
        each_bytes += trained * STATE_BYTES * (1 + moments) / homes
    return mesh.block.usable_memory_bytes / each_bytes
