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
from hexijax.runtime.lowering import Compiled, Given, Job, Lowered, Work

Progress = Callable[[str, int, int], None]
Future = concurrent.futures.Future[Any]


class Compiler:
    """Compiles the segments of a plan, each distinct program once."""

    def __init__(self, layout: Layout, progress: Progress | None = None):
        self.layout = layout
        self._progress = progress or (lambda what, done, total: None)
        self._made: dict[Any, Job] = {}
        self._wanted: dict[Any, Any] = {}
        self._awaited: dict[Future, Lowered] = {}
        self._done = self._total = 0

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
        self.begin()
        self.wait()
        return self._found()

    def begin(self) -> dict[Any, Compiled]:
        """The same while the last ones are compiled: whoever calls one waits for it.

        The longest is begun first.
        """
        jobs = sorted(self._made.values(), key=_num_equations, reverse=True)
        programs = [job.work.value for job in jobs]
        self._total = sum(map(len, programs))
        self._progress("compiling", 0, self._total)
        pool = concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        for turn in range(max(map(len, programs), default=0)):
            first: dict[Future, Lowered] = {}
            for job in jobs:
                left = len(job.work.value) - turn
                if left < 1:
                    continue
                lowered = job.lower(turn)
                future = pool.submit(lowered.lowered.compile)
                if left > 1:
                    first[future] = lowered
                else:
                    lowered.keep(Awaited(future))
                    self._awaited[future] = lowered
            self._keep(first)
        pool.shutdown(wait=False)
        return self._found()

    def wait(self) -> None:
        """Until all of them are compiled."""
        awaited = self._awaited
        self._awaited = dict[Future, Lowered]()
        self._keep(awaited)

    def _keep(self, futures: Mapping[Future, Lowered]) -> None:
        for future in concurrent.futures.as_completed(futures):
            futures[future].keep(future.result())
            self._done += 1
            self._progress("compiling", self._done, self._total)

    def _found(self) -> dict[Any, Compiled]:
        return {
            name: dataclasses.replace(self._made[key].compiled, segment=segment)
            for name, (key, segment) in self._wanted.items()
        }


class Awaited:
    """A program that is being compiled."""

    def __init__(self, future: Future):
        self._future = future

    def __call__(self, *args: Any) -> Any:
        """Runs it."""
        return self._future.result()(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future.result(), name)


def _num_equations(job: Job) -> int:
    return sum(len(body.eqns) for body in job.segment.code.bodies)


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
