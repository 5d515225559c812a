"""A stored step into an engine, whatever plan and cluster wrote it.

    Inventory, engine -> the newest whole step -> assemble -> engine.load -> Restored

What turns out damaged while it is read is read elsewhere, if it is elsewhere, else an
older step is taken; either is said. A step of another model is refused.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hexijax.checkpoint.assemble import Assign, Missing, Moved, assemble, first_holder
from hexijax.checkpoint.assign import soonest
from hexijax.checkpoint.slices import Key, Slice, Stateful, Tensor
from hexijax.checkpoint.sources import Damaged, Held, Source
from hexijax.checkpoint.tiers import Inventory
from hexijax.errors import UserError
from hexijax.plan.precision import FIRST_SCALE, STATE_KEY
from hexijax.weights.stored.manifest import Manifest, Stand
from hexijax.weights.stored.parts import first_gap

if TYPE_CHECKING:
    import jax

SCALE = Key("", STATE_KEY)
"""Which a plan has or not, by the dtypes it computes in: no part of the model."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """Where a run goes on, and what was read for it."""

    stand: Stand
    """Where."""

    moved: Moved
    """What was read."""

    notes: tuple[str, ...]
    """What was passed over, and why."""


def restore(
    engine: Stateful,
    stored: Inventory,
    *,
    where: str,
    facts: Mapping[str, Any],
    step: int | None = None,
    node_of: "Mapping[jax.Device, str] | None" = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Restored:
    """Loads a step (None: the newest that is whole and sound).

    Args:
      engine: that takes it.
      stored: what there is.
      where: it was looked for, for people.
      facts: what must be equal, by a name for people.
      step: that was asked for; no other is taken then.
      node_of: node of each device of the engine, which reads its own disk first.
      tell: is told of what is passed over.

    Raises:
      UserError: there is no such step, or it is of another model, data or seed.
    """
    stand = look(stored, step, where=where, facts=facts)
    tried: list[str] = []

    def passed(text: str) -> None:
        tried.append(text)
        tell(text)

    steps = [stand.step] if step is not None else stored.whole()
    for each in steps:
        known = stored.manifests(each)[0]
        check_facts(known.stand.facts, facts, where)
        check_model(known.tensors, engine.tensors(), f"{where}, step {each}")
        found = _read(engine, known, stored.sources(each), node_of, passed)
        if found is not None:
            return Restored(stand=known.stand, moved=found, notes=tuple(tried))
    what = "\n".join(f"  {line}" for line in tried)
    raise UserError(
        f"No step in {where} can be read whole; {len(steps)} were tried:\n{what}"
    )


def look(
    stored: Inventory,
    step: int | None = None,
    *,
    where: str,
    facts: Mapping[str, Any] | None = None,
) -> Stand:
    """Where a step (None: the newest that is whole) stood; no array is read.

    Raises:
      UserError: there is no such step, or it has other facts.
    """
    steps = stored.whole()
    if not steps or (step is not None and step not in steps):
        what = "no checkpoint" if step is None else f"no step {step}"
        have = f" Whole steps are {', '.join(map(str, steps))}." if steps else ""
        raise UserError(
            f"There is {what} in {where}.{have} A run writes one at its end, unless it "
            "was told --no-save, and every N steps with --save-every N."
        )
    stand = stored.manifests(steps[0] if step is None else step)[0].stand
    check_facts(stand.facts, facts or {}, where)
    return stand


def check_facts(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], where: str
) -> None:
    """Raises a ``UserError`` for the first that differs."""
    for name, value in wanted.items():
        if name in saved and saved[name] != value:
            raise UserError(
                f"The checkpoint {where} cannot be resumed: its {name} is "
                f"{saved[name]}, this run's is {value}. Resume with what it was "
                "written under, or start a new run."
            )


def check_model(
    saved: Mapping[Key, Tensor], wanted: Mapping[Key, Tensor], where: str
) -> None:
    """Raises a ``UserError`` that names the first array at which the two differ."""
    for key in dict.fromkeys([*wanted, *saved]):
        if key != SCALE and saved.get(key) != wanted.get(key):
            whose = f"of {key.name!r} ({key.kind})" if key.name else f"{key.kind!r}"
            raise UserError(
                f"The checkpoint {where} belongs to another model or optimizer. The "
                f"first difference is the state {whose}: it has "
                f"{saved.get(key, 'none')}, this run has {wanted.get(key, 'none')}. "
                "Resume with the model that wrote it, or begin a new run with its "
                "parameters: init=PATH."
            )


def _read(
    engine: Stateful,
    known: Manifest,
    sources: Sequence[Source],
    node_of: "Mapping[jax.Device, str] | None",
    passed: Callable[[str], None],
) -> Moved | None:
    """Loads one step; None: what is sound of it is not whole."""
    step, left = known.stand.step, list(sources)
    wants_scale = SCALE in engine.tensors()
    if wants_scale and SCALE not in known.tensors:
        passed(
            f"step {step} was saved without a dynamic loss scale: it begins at "
            f"{FIRST_SCALE:g}"
        )
        fresh = np.asarray([FIRST_SCALE, 0.0], np.float32)
        left.append(Held(arrays={Slice(*SCALE, ((0, 2),)): fresh}))
    while True:
        several = len({source.label for source in left}) > 1
        assign: Assign = soonest() if several else first_holder
        try:
            arrays, moved = assemble(engine.targets(), left, assign, node_of)
        except Damaged as error:
            left = [source for source in left if source is not error.source]
            again = first_gap(known.tensors, [s.holds for s in left]) is None
            then = "it is read elsewhere" if again else "an older step is looked for"
            passed(f"step {step} is damaged: {error} So {then}.")
            if not again:
                return None
        except Missing as error:
            passed(f"step {step} is not whole: {error}")
            return None
        else:
            engine.load(arrays)
            return moved
