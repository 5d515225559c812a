"""No mixing: the best plan on each kind alone and on each node alone.

Not a published system but what a person does: leave the other cards out. Nothing else
is left even, so that what mixing gains is not what balancing gains.
"""

from collections.abc import Iterable, Iterator, Sequence

from hexijax.planner.baselines.baseline import all_pools, from_drafts, grids
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, Yard, orders
from hexijax.planner.baselines.draft import Batch, Draft, Layers, Rules
from hexijax.planner.options import PlanOptions

BALANCED = Rules(layers=Layers.TIMES, batch=Batch.TIMES, common=False)
"""Nothing is even that need not be."""


def pools(yard: Yard, options: PlanOptions) -> Iterable[Sequence[Block]]:
    """Parts of one kind, or of one node."""
    for pool in all_pools(yard, options):
        if len({block.kind for block in pool}) == 1 or (
            len({block.node for block in pool}) == 1
        ):
            yield pool


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """All grids on a pool, even and balanced."""
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield Draft(pipelines=pipelines)
            yield Draft(pipelines=pipelines, rules=BALANCED)


one_kind = from_drafts(drafts, pools)
