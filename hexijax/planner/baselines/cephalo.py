"""Cephalo: every device holds the whole model, batch and state as uneven as they like.

Microbatches of any size and number for each device, so that the last ends as soon as
can be; where the state lies is settled apart, by the room that is left.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from hexijax.planner.baselines.baseline import from_drafts, with_lanes
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block
from hexijax.planner.baselines.draft import Batch, Draft, Rules

ANY_BATCH = Rules(batch=Batch.TIMES, common=False, any_size=True)
"""Uneven work, even state."""

ANY_STATE = dataclasses.replace(ANY_BATCH, uneven_state=True)
"""Both as uneven as devices are."""


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """One-stage replicas over a pool."""
    yard = composer.yard
    pipelines = [(mesh,) for block in pool for mesh in yard.meshes(block, 1)]
    for together in with_lanes(yard, pipelines):
        for rules in (ANY_BATCH, ANY_STATE):
            yield Draft(pipelines=together, rules=rules)


cephalo_style = from_drafts(drafts)
