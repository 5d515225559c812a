"""Whale: even parallel structure, work in proportion to what devices can compute.

The grids of ``megatron``; layers balanced over stages, and the batch over replicas, by
the peak FLOP/s of the devices (in number or in size of
microbatches), memory permitting.
"""

from collections.abc import Iterator, Sequence

from hexijax.planner.baselines.baseline import from_drafts, grids
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, orders
from hexijax.planner.baselines.draft import Batch, Draft, Layers, Rules


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """All grids on a pool, even and balanced."""
    mixed = len({block.kind for block in pool}) > 1
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield Draft(pipelines=pipelines)
            if not mixed:
                continue  # equal devices: balanced is even
            for batch in (Batch.FLOPS, Batch.FLOPS_SIZES):
                rules = Rules(layers=Layers.FLOPS, batch=batch, common=False)
                yield Draft(pipelines=pipelines, rules=rules)


whale_style = from_drafts(drafts)
