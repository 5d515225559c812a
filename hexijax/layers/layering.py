"""The flat program cut into layers: their borders, equations and parameter groups."""

import functools
from typing import Any

from hexijax.layers import cut, jaxprs, pieces
from hexijax.layers.chain import Group
from hexijax.layers.equations import Equations

UNUSED = "unused"
"""Group of the parameters that no layer reads; the last layer holds it."""

FROZEN = ".frozen"
"""Ends the name of a layer's parameters that do not train, where others of it do."""


class Layering:
    """Layers of a flat program, by index."""

    def __init__(self, equations: Equations) -> None:
        self.equations = equations
        cuts, self.notes = cut.find_cuts(equations)
        self.names = tuple(c.name for c in cuts)
        """Of the layers, in order."""
        self.starts = tuple(c.start for c in cuts)
        """Index of each layer's first equation."""

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def borders(self) -> tuple[tuple[Any, ...], ...]:
        """Live variables before each layer; last, the outputs of the loss."""
        between = [self.equations.border(start) for start in self.starts[1:]]
        return ((), *between, tuple(self.equations.outputs.values()))

    @functools.cached_property
    def bodies(self) -> tuple[pieces.Body, ...]:
        """The equations of each layer."""
        ends = (*self.starts[1:], len(self.equations.eqns))
        spans = zip(self.starts, ends, self.borders[1:], strict=True)
        return tuple(pieces.body(self.equations, *span) for span in spans)

    def reads(self, start: int, stop: int) -> list[Any]:
        """What layers [start, stop) and the outputs they make read from outside."""
        read = [v for body in self.bodies[start:stop] for v in body.reads]
        if stop == len(self):
            made = set(self.bodies[-1].makes)
            outputs = jaxprs.variables(self.borders[-1])
            read += [v for v in outputs if v not in made]
        return read

    @functools.cached_property
    def groups(self) -> tuple[tuple[Group, tuple[Any, ...]], ...]:
        """Parameter groups with their variables, in the order of first use."""
        params = self.equations.params
        users: dict[Any, list[int]] = {}
        for i in range(len(self)):
            prelude = pieces.param_prelude(self.equations, self.reads(i, i + 1))
            for v in prelude.invars:
                if v in params:
                    users.setdefault(v, []).append(i)
        first = self.equations.first_use
        order = sorted(users, key=lambda v: first.get(v, len(self.equations.eqns)))
        members: dict[tuple[tuple[int, ...], bool], list[Any]] = {}
        for v in order:
            members.setdefault((tuple(users[v]), params[v].trainable), []).append(v)
        found = []
        for (layers, trainable), variables in members.items():
            tied = len(layers) > 1
            name = params[variables[0]].id if tied else self.names[layers[0]]
            if not (tied or trainable) and (layers, True) in members:
                name += FROZEN
            found.append((name, layers, variables))
        for trainable in (True, False):
            unused = [v for v in params if v not in users]
            unused = [v for v in unused if params[v].trainable is trainable]
            if unused:
                name = UNUSED if trainable else UNUSED + FROZEN
                found.append((name, (len(self) - 1,), unused))
        return tuple(
            (
                Group(name=name, leaves=tuple(params[v] for v in vs), layers=layers),
                tuple(vs),
            )
            for name, layers, vs in found
        )

    @functools.cached_property
    def first_trained(self) -> int:
        """The first layer with a parameter that trains; no gradient goes further."""
        used = (group.layers[0] for group, _ in self.groups if group.trainable)
        return min(used, default=len(self))

    def groups_of(self, start: int, stop: int) -> list[tuple[Group, tuple[Any, ...]]]:
        """Groups that layers [start, stop) read."""
        return [
            (group, variables)
            for group, variables in self.groups
            if any(start <= layer < stop for layer in group.layers)
        ]
