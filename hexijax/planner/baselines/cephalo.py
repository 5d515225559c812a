"""Cephalo: every device holds the whole model, batch and state as uneven as they like.

Microbatches of any size and number for each device, so that the last ends as soon as
can be; where the state lies is settled apart, by the room that is left.
"""

from collections.abc import Iterator, Sequence

from hexijax.planner.baselines.baseline import from_drafts, with_lanes
from hexijax.planner.baselines.devices import Block
from hexijax.planner.baselines.draft import Batch, Composer, Draft


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """One-stage replicas over a pool."""
    yard = composer.yard
    pipelines = [(mesh,) for block in pool for mesh in yard.meshes(block, 1)]
    for together in with_lanes(yard, pipelines):
        for uneven_state in (False, True):
            yield Draft(
                pipelines=together,
                batch=Batch.TIMES,
                common=False,
                any_size=True,
                uneven_state=uneven_state,
            )


cephalo_style = from_drafts(drafts)
