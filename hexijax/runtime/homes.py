"""A plan's state, in and out of its homes.

    parameters, or arrays by slice -> Homes -> state in the executor -> arrays by slice

Everybody else has state by global name, an array for each box and moment; the executor
has it as it rests.
"""

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hexijax.experiment import Experiment
from hexijax.plan.plan import Place
from hexijax.program import names
from hexijax.program.lower import StepRules
from hexijax.program.program import HOST
from hexijax.runtime import scaling, weights
from hexijax.runtime import state as stored
from hexijax.runtime.everywhere import everywhere
from hexijax.runtime.executor import Executor
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.intake import made_params
from hexijax.runtime.layout import Layout
from hexijax.runtime.making import Made
from hexijax.runtime.programs import struct
from hexijax.runtime.verdicts import Verdicts
from hexijax.weights.slices import Key, Slice
from hexijax.weights.source import Source, Tensor
from hexijax.weights.stored.manifest import Param


class Homes:
    """What an engine knows of its state."""

    experiment: Experiment
    layout: Layout
    devices: Mapping[str, jax.Device]
    groups: Mapping[str, GroupRuntime]
    _abstract: Any
    _executor: Executor
    _rules: StepRules
    _verdicts: Verdicts
    _came_as: Mapping[str, str]
    _asked: int

    def init(self, given: Experiment | None = None) -> None:
        """The first parameters of ``given``, or of the experiment, at their homes, with
        fresh moments."""
        reads = collections.Counter(
            leaf.name for group, home in self._homes() for leaf, _ in group.held[home]
        )
        device = next(d for d in self.devices.values() if self.layout.carrier.here(d))
        self._put_params(made_params(given or self.experiment, device, reads))

    def set_params(self, params: Any) -> None:
        """Master parameters from a tree of arrays or a source with the model's names,
        with fresh moments.

        A source is read a box at a time, by the device whose box it is.
        """
        known = isinstance(params, Source)
        self._put_params(params if known else stored.by_name(params))

    def _put_params(self, params: Source | Made | Mapping[str, Any]) -> None:
        self._came_as = {}
        if isinstance(params, Source):
            self._came_as = weights.came_as(params, self._abstract)
            masters = functools.partial(weights.put_masters, params)
        else:
            masters = functools.partial(self._cut_masters, params)
        for group, home in self._homes():
            state = group.init_state(home, masters(group, home))
            self._put_state(group, home, state)
        self._put_scale(scaling.first_state())
        self._executor.run_prologue()

    def _homes(self) -> Iterator[tuple[GroupRuntime, Place]]:
        """Every group with each of its homes that this process drives."""
        for group in self.groups.values():
            for home in group.homes:
                if self.layout.here(home):
                    yield group, home

    @property
    def _has_scale(self) -> bool:
        """Whether this process keeps the state of a dynamic loss scale."""
        return self._rules.dynamic_scale and self.layout.here(self._verdicts.host)

    def _put_scale(self, state: Any) -> None:
        if self._has_scale:
            here = self.layout.replicated(self._verdicts.host)
            self._executor.put(names.scale(HOST), jax.device_put(state, here))

    def _cut_masters(
        self, given: Made | Mapping[str, Any], group: GroupRuntime, home: Place
    ) -> tuple[jax.Array, ...]:
        cut = [
            stored.cut(given[leaf.name], leaf, box) for leaf, box in group.held[home]
        ]
        return group.place_masters(home, cut)

    def _put_state(
        self, group: GroupRuntime, home: Place, state: Mapping[str, Any]
    ) -> None:
        self._executor.put(group.state_buffer(home), group.closed(home, state))

    def state(self) -> dict[tuple[Place, str], dict[str, Any]]:
        """(home, group) -> master parameters and moments, of homes that are here."""
        return {
            (home, group.group.name): group.opened(home, state)
            for group, home, state in self._states()
        }

    def _states(self) -> Iterator[tuple[GroupRuntime, Place, Any]]:
        """As the executor has them."""
        self._executor.settle()  # where no home is, too: others may wait for its part
        for group, home in self._homes():
            yield group, home, self._executor.get(group.state_buffer(home))

    def _everywhere(self, field: str) -> stored.State:
        self._asked += 1
        return everywhere(
            self.layout, self.groups, self.state(), [field], turn=self._asked
        )

    def params(self) -> Any:
        """The user's parameter tree, as NumPy arrays of the master copies."""
        state = self._everywhere("master")
        return stored.assemble(self._abstract, self.groups, state)

    def weights(self) -> Source:
        """The master parameters as a source: read where they lie, box by box."""
        state = self._everywhere("master")
        return weights.Held(self._abstract, self.groups, state)

    def stored_params(self) -> list[Param]:
        """Where each parameter is in the model's tree."""
        return weights.stored(self._abstract, self._came_as)

    def moments_like(self, kind: str) -> dict[str, np.ndarray]:
        """One kind of moment by parameter name; ``kind`` is its path in the state."""
        state = self._everywhere("moments")
        return stored.assemble_moments(self._abstract, self.groups, state, kind)

    def slices(self) -> dict[Slice, list[jax.Array]]:
        """Every state array where it lies, and a loss scale; see ``state.slices``."""
        found = stored.slices(self.groups, self.state())
        if self._has_scale:
            found[scaling.SLICE] = [self._executor.get(names.scale(HOST))]
        return found

    def targets(self) -> dict[Slice, list[jax.ShapeDtypeStruct]]:
        """Shapes, dtypes and shardings of ``slices``, in its order."""
        structs = {
            (home, group.group.name): group.state_structs(home)
            for group, home in self._homes()
        }
        targets = stored.slices(self.groups, structs)
        if self._has_scale:
            where = self.layout.replicated(self._verdicts.host)
            targets[scaling.SLICE] = [struct(scaling.SHAPE, "float32", where)]
        return targets

    def tensors(self) -> dict[Key, Tensor]:
        """Shape and dtype of all that ``slices`` are boxes of."""
        found = stored.tensors(self._abstract, self.groups)
        if self._rules.dynamic_scale:
            found[scaling.SLICE.key] = scaling.TENSOR
        return found

    def load(self, arrays: Mapping[Slice, Sequence[jax.Array]]) -> None:
        """What ``slices`` gave, like ``targets``, at its homes; parameters follow.

        The next update overwrites the arrays.
        """
        state = stored.unsliced(self._homes(), arrays)
        for (home, name), value in state.items():
            self._put_state(self.groups[name], home, value)
        if self._has_scale:
            self._put_scale(arrays[scaling.SLICE][0])
        self._executor.run_prologue()

    def wait(self) -> None:
        """Until everything dispatched so far is computed."""
        jax.block_until_ready([state["master"] for _, _, state in self._states()])
