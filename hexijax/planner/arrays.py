"""Figures of every layer, and of every run of layers, on one mesh.

    Chain, MeshShape, samples -> LayerArrays

Arrays: L layers, F first layer, S the one past the last, P policies.
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from hexijax.costs.activations import (
    CPU,
    enter_bytes,
    handed_bytes,
    held_bytes,
    joined_bytes,
    kept_bytes,
    layer_params,
    working_bytes,
)
from hexijax.costs.compute import MeshShape, layer_times
from hexijax.costs.temp import temp_factor
from hexijax.costs.working import SCRATCH_BYTES, waiting_layers, working_of
from hexijax.layers.chain import ITEM_BYTES, Chain, Remat


class ShapeArrays:
    """Figures of each layer, and each run, on one mesh that no microbatch changes."""

    def __init__(self, chain: Chain, mesh: MeshShape) -> None:
        dtype, tensor = mesh.dtype, mesh.tensor
        layers = range(len(chain.layers))
        held = [held_bytes(chain, (i, i + 1), tensor, dtype) for i in layers]
        held_L = np.array([x.handed for x in held], float)
        trained_L = np.array([x.trained for x in held], float)
        self.params_L = np.array(layer_params(chain, tensor), float)
        whole_params_L = np.array(layer_params(chain, 1), float)
        self.length_FS = _lengths(len(layers))
        self.params_FS = _span_sums(self.params_L)
        self.largest_FS = _span_max(self.params_L)
        self.whole_params_FS = _span_sums(whole_params_L)
        self.held_FS = _span_sums(held_L)
        self.trained_FS = _span_sums(trained_L)
        self.most_trained_FS = _span_max(trained_L)


class LayerArrays:
    """Figures of each layer on one mesh for one microbatch size."""

    def __init__(
        self,
        chain: Chain,
        mesh: MeshShape,
        samples: int,
        remat: tuple[Remat, ...],
        shape: ShapeArrays | None = None,
    ) -> None:
        """``shape``: the mesh's own, where they are there."""
        dtype, tensor = mesh.dtype, mesh.tensor
        layers = chain.layers_under(fused_attention=mesh.fused_attention)
        times = layer_times(chain, mesh, samples)
        shape = shape or ShapeArrays(chain, mesh)
        self.params_L, self.length_FS = shape.params_L, shape.length_FS
        self.params_FS, self.largest_FS = shape.params_FS, shape.largest_FS
        self.whole_params_FS, self.held_FS = shape.whole_params_FS, shape.held_FS
        self.trained_FS = shape.trained_FS
        self.most_trained_FS = shape.most_trained_FS
        self.item_bytes, self.lanes = ITEM_BYTES[dtype], mesh.lanes
        self.temp_factor = temp_factor(mesh.profile, dtype)
        alike: dict[object, int] = {}
        before = 0
        like_L: list[int] = []
        for layer, time in zip(layers, times, strict=True):
            key = (id(time), before, layer.border_bytes, layer.backward)
            like_L.append(alike.setdefault(key, len(alike)))
            before = layer.border_bytes
        unlike = [like_L.index(n) for n in range(len(alike))]

        def every(figure: Callable[[int], float]) -> Float[np.ndarray, " layers"]:
            """A figure of each layer; equal ones are asked for once."""
            return np.array([figure(i) for i in unlike], float)[like_L]

        def under(figure: Callable[[int, Remat], float]) -> np.ndarray:
            """The same under each policy."""
            return np.stack([every(lambda i, p=p: figure(i, p)) for p in remat])

        of = dtype, tensor, samples
        self.seconds_L = every(lambda i: times[i].forward_s + times[i].backward_s)
        # The loss's own segment runs both ways in one program, the others apart.
        self.added_s_PL = under(lambda i, p: times[i].added_s(p, joined=False))
        self.joined_s_PL = under(lambda i, p: times[i].added_s(p, joined=True))
        self.kept_PL = under(lambda i, p: kept_bytes(chain, layers[i], p, *of))
        # In the loss's own segment it is alive in one program, and once.
        if mesh.profile.vendor == CPU:
            self.joined_PL = under(lambda i, p: joined_bytes(chain, layers[i], p, *of))
            self.working_L = every(lambda i: working_bytes(chain, layers[i], *of))
            # The layer a program of both ways works on was kept in part before, and
            # that part counts once.
            self.part_PL = np.maximum(self.working_L - self.joined_PL, 0)
            self.early_L, self.scratch_bytes = np.zeros(len(layers)), 0.0
            self.waiting_layers = len(layers)
        else:  # what an accelerator's programs have alive
            alive = {
                (i, p): working_of(chain, layers, [p], *of, i)[0]
                for i in unlike
                for p in remat
            }
            self.joined_PL = under(lambda i, p: alive[i, p].kept)
            self.part_PL = under(lambda i, p: alive[i, p].joined)
            self.working_L = under(lambda i, p: alive[i, p].apart).max(axis=0)
            self.early_L = under(lambda i, p: alive[i, p].early).max(axis=0)
            self.scratch_bytes = float(SCRATCH_BYTES)
            self.waiting_layers = min(len(layers), waiting_layers(mesh.profile))
        handed_L = every(lambda i: handed_bytes(chain, layers[i], *of))
        # One more than layers: nothing enters the first, or leaves the last.
        left_L = every(lambda i: enter_bytes(chain, i + 1, dtype, samples))
        self.enter_S = np.concatenate([[0.0], left_L])
        # Of a segment's first layer, what enters counts with the borders.
        reads_PL = under(lambda i, p: p in layers[i].reads_input)
        self.apart_PL = np.maximum(self.kept_PL - self.enter_S[:-1] * reads_PL, 0)
        self.batch_bytes = samples * sum(a.num_bytes for a in chain.batch.values())
        # Of runs of layers, whatever the load: many loads are tried.
        self.handed_FS = _span_sums(handed_L)
        self.working_FS = _span_max(self.working_L)
        self.most_entering_FS = _span_max(self.enter_S[:-1])
        self.left_FS, self.right_FS = np.broadcast_arrays(
            self.enter_S[:-1, None], self.enter_S[None, :]
        )
        self.edges_FS = self.left_FS + self.right_FS
        self.seconds_FS = _span_sums(self.seconds_L)
        self.kept_PS = _sums(self.kept_PL)
        self.entering_FS = _span_sums(self.enter_S[:-1])
        self.added_s_PS, self.joined_s_PS = (
            _sums(added_s_PL) for added_s_PL in (self.added_s_PL, self.joined_s_PL)
        )
        self.early_FS = _span_sums(self.early_L)
        self.most_early_FS = _span_max(self.early_L)
        self.joined_PS = _sums(self.joined_PL) * self.temp_factor
        self._set_apart()
        part_PF = np.array([_span_max(part_L)[:, -1] for part_L in self.part_PL])
        self.more_PF = self.temp_factor * (part_PF - self.working_FS[:, -1])
        self.second_is_quicker = len(remat) > 1 and bool(
            (self.added_s_PL[1] < self.added_s_PL[0]).any()
        )
        self.known: dict[object, object] = {}
        """What was reckoned of them before."""

    def _set_apart(self) -> None:
        """Of layers that are a segment each, and run all microbatches one by one: the
        loss's runs both ways at once, and keeps nothing."""
        self.apart_PL[:, -1] = 0
        self.apart_PS = _sums(self.apart_PL)
        last = (self.joined_PL + self.part_PL)[:, -1].max()
        self.last_bytes = self.temp_factor * float(last)


def _lengths(num_layers: int) -> Int[np.ndarray, "layers stops"]:
    """Layers of each run; none or negative where the run is empty."""
    return np.arange(num_layers + 1)[None, :] - np.arange(num_layers)[:, None]


def _sums(values_PL: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, 2, ... values along the last dim."""
    none = np.zeros((*values_PL.shape[:-1], 1))
    return np.concatenate([none, np.cumsum(values_PL, axis=-1)], axis=-1)


def _span_sums(values_L: np.ndarray) -> Float[np.ndarray, "layers stops"]:
    sums_S = _sums(values_L)
    return sums_S[None, :] - sums_S[:-1, None]


def _span_max(values_L: np.ndarray) -> Float[np.ndarray, "layers stops"]:
    """The largest value of each run; 0 where it is empty."""
    num_layers = len(values_L)
    most_FS = np.zeros((num_layers, num_layers + 1))
    np.multiply(_inside(num_layers), values_L, out=most_FS[:, 1:])
    return np.maximum.accumulate(most_FS, axis=1)


@functools.lru_cache(maxsize=64)
def _inside(num_layers: int) -> Int[np.ndarray, "layers lasts"]:
    """1 where a layer is not before a run's first."""
    return np.triu(np.ones((num_layers, num_layers), int))
