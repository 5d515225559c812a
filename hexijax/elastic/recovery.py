"""The newest step of which every piece still lies somewhere, into a new engine.

    live engine, what it holds -> held -> Kept(step at hand) --+
    stores, what survivors and the far tier hold -> Kept ... --+--> recover -> engine

A step that is not whole, or turns out damaged while it is read, is passed over for the
one before it. Each says why. What is read from where is assigned so that it ends first.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hexijax.checkpoint.assemble import Missing, Moved, assemble
from hexijax.checkpoint.assign import Rate, own_rate, soonest
from hexijax.checkpoint.slices import Key, Slice, Stateful
from hexijax.checkpoint.sources import DEVICE, Damaged, Held, Source, live_sources
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.plan.precision import FIRST_SCALE, STATE_KEY

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A step, and places that hold pieces of its state; perhaps not all."""

    step: int
    """Optimizer steps done."""

    data_state: Any
    """Position of the data iterator."""

    sources: Sequence[Source]
    """Which can be read now."""

    def without(self, nodes: Collection[str]) -> "Kept":
        """What is left of it when nodes are lost."""
        left = [source for source in self.sources if source.node not in nodes]
        return dataclasses.replace(self, sources=left)


class Store(Protocol):
    """Where steps are kept: tiers, copies on neighbours."""

    def forget(self, node: str) -> None:
        """A node is lost, with whatever it held."""
        ...

    def kept(self) -> Iterable[Kept]:
        """What there still is, the newest step first; none is read yet."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """Where a run goes on."""

    step: int
    """Optimizer steps done."""

    data_state: Any
    """Position of the data iterator."""

    moved: Moved
    """What was read."""

    passed_over: tuple[str, ...]
    """Newer steps that are not whole, and why, a line each."""


def held(
    engine: Stateful, node_of: "Mapping[jax.Device, str]", nodes: Collection[str]
) -> list[Held]:
    """What an engine's devices hold on some nodes, in their hosts' memory.

    The engine may go then: its devices are free for the next one's state.
    """
    lives = {device: node for device, node in node_of.items() if node in nodes}
    return [
        Held(
            arrays={each: np.asarray(x) for each, x in source.shards.items()},
            label=DEVICE,
            node=source.node,
        )
        for source in live_sources(engine, lives)
    ]


def recover(
    engine: Stateful,
    kept: Iterable[Kept],
    *,
    node_of: "Mapping[jax.Device, str]",
    rate: Rate = own_rate,
) -> Recovered:
    """Loads the newest step that is whole.

    Args:
      engine: that takes it.
      kept: what there is, in any order; pieces of one step may be listed apart.
      node_of: node of each device of the engine.
      rate: from a source to a node.

    Raises:
      UserError: none is whole.
    """
    steps: dict[int, list[Kept]] = {}
    for each in kept:
        steps.setdefault(each.step, []).append(each)
    passed_over = list[str]()
    for step in sorted(steps, reverse=True):
        sources = [source for each in steps[step] for source in each.sources]
        sources += _first_scale(engine, sources)
        moved = _loaded(engine, step, sources, node_of, rate, passed_over.append)
        if moved is not None:
            return Recovered(
                step=step,
                data_state=steps[step][0].data_state,
                moved=moved,
                passed_over=tuple(passed_over),
            )
    tried = "\n".join(f"  {line}" for line in passed_over) or "  nothing was saved"
    raise UserError(
        f"No step of the run is whole any more; {len(steps)} were looked at:\n{tried}\n"
        "State has one home, so what a lost machine held comes from a save: save more "
        "often (--save-every), and where no machine can take it along (--far)."
    )


def _loaded(
    engine: Stateful,
    step: int,
    sources: Sequence[Source],
    node_of: "Mapping[jax.Device, str]",
    rate: Rate,
    tell: Callable[[str], object],
) -> Moved | None:
    """Loads one step; None: it is not whole. What is damaged in one source is read from
    another, if that has it."""
    while True:
        try:
            arrays, moved = assemble(engine.targets(), sources, soonest(rate), node_of)
        except Missing as error:
            tell(f"step {step}: {error}")
            return None
        except Damaged as error:
            tell(f"step {step}: {error}")
            bad = getattr(error, "source", None)
            left = [source for source in sources if source is not bad]
            if len(left) == len(sources):  # it does not say which
                return None
            sources = left
        else:
            engine.load(arrays)
            return moved


def _first_scale(engine: Stateful, sources: Sequence[Source]) -> list[Held]:
    """A dynamic loss scale's beginning, for a plan whose dtypes ask for one under which
    none was kept."""
    key = Key("", STATE_KEY)
    if key not in engine.tensors() or any(source.holds.get(key) for source in sources):
        return []
    fresh = np.asarray([FIRST_SCALE, 0.0], np.float32)
    return [Held(arrays={Slice(*key, ((0, 2),)): fresh})]


def between(cluster: Cluster) -> Rate:
    """Rates that know a cluster's links: what comes from another node is no faster
    than the way there."""
    nodes = {node.name: node for node in cluster.nodes}

    def rate(source: Source, node: str) -> float:
        own = own_rate(source, node)
        if source.node == node or source.node not in nodes or node not in nodes:
            return own
        link = cluster.links.between(nodes[source.node], nodes[node])
        return own if link is None else min(own, link.bytes_per_s)

    return rate
