"""Segments compiled for their meshes: one microbatch forward, backward, evaluated.

    layers.Segment (one lane's arrays) -> Compiled (arrays with a lane dim) -> executor

Programs are lowered one after another and compiled side by side; two segments that are
alike on the same devices share one.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hexijax.layers.chain import Leaf
from hexijax.layers.segment import Segment
from hexijax.plan.plan import Place
from hexijax.runtime.layout import Layout
from hexijax.runtime.lowering import Compiled, Given, Job, Work

Progress = Callable[[str, int, int], None]


class Compiler:
    """Compiles the segments of a plan, each distinct program once."""

    def __init__(self, layout: Layout, progress: Progress | None = None):
        self.layout = layout
        self._progress = progress or (lambda what, done, total: None)
        self._made: dict[Any, Job] = {}
        self._wanted: dict[Any, Any] = {}

    def add(
        self,
        name: Any,
        place: Place,
        segment: Segment,
        dtypes: Sequence[str],
        work: Work,
    ) -> None:
        """Ask for a segment's programs; its parameters arrive in ``dtypes``."""
        names, lanes, tensor = self.layout.shape(place)
        leaves = [self.layout.leaf[leaf.id] for leaf in segment.leaves]
        cut = tuple(leaf.tensor_dim for leaf in leaves) if tensor > 1 else ()
        key = (segment.signature, names, lanes, tensor, cut, tuple(dtypes), work)
        if key not in self._made:
            self._made[key] = Job(self.layout, place, segment, dtypes, work)
        self._wanted[name] = (key, segment)

    def given(self, name: Any) -> Given:
        """What the programs called ``name`` are handed."""
        key, _ = self._wanted[name]
        return self._made[key].given()

    @property
    def num_distinct(self) -> int:
        """Segments that differ in computation or devices."""
        return len(self._made)

    def compile(self) -> dict[Any, Compiled]:
        """All programs asked for, by name."""
        jobs = list(self._made.values())
        programs = [job.work.value for job in jobs]
        total = sum(map(len, programs))
        done = 0
        self._progress("compiling", 0, total)
        workers = min(16, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for turn in range(max(map(len, programs), default=0)):
                due = [job for job in jobs if len(job.work.value) > turn]
                futures = [pool.submit(job.lower(turn).finish) for job in due]
                for future in concurrent.futures.as_completed(futures):
                    future.result()
                    done += 1
                    self._progress("compiling", done, total)
        return {
            name: dataclasses.replace(self._made[key].compiled, segment=segment)
            for name, (key, segment) in self._wanted.items()
        }


def zeros(layout: Layout, place: Place, leaves: Sequence[Leaf]) -> Callable[[], Any]:
    """A compiled maker of fresh gradient accumulators."""
    shardings: tuple[NamedSharding, ...] = tuple(layout.grad(place, x) for x in leaves)
    shapes = tuple(layout.grad_shape(place, x) for x in leaves)

    def make() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)

    return jax.jit(make, out_shardings=shardings)


def lane_arrays(
    layout: Layout, place: Place, arrays: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Rows of host arrays on the lanes of a place: ``[lanes, rows a lane, ...]``."""
    lanes = layout.lanes(place)
    shaped = {
        k: v.reshape(lanes, v.shape[0] // lanes, *v.shape[1:])
        for k, v in arrays.items()
    }
    return jax.device_put(shaped, layout.by_lane(place))
