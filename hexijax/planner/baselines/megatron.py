"""Megatron-LM: one even 3D grid, the best of all of them.

Data x pipeline x tensor degrees, equal layers, equal microbatches, one remat policy for
all; microbatch size, node order and rank layout swept. Devices of any kind take any
place in the grid, so the slowest sets the pace.
"""

from collections.abc import Iterator, Sequence

from hexijax.planner.baselines.baseline import from_drafts, grids
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, orders
from hexijax.planner.baselines.draft import Draft, Rules


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """All grids on a pool."""
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield Draft(pipelines=pipelines, rules=Rules(uniform_remat=True))


megatron_style = from_drafts(drafts)
