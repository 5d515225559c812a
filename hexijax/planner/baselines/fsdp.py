"""FSDP: every device holds the whole model, state sharded evenly, equal samples.

Microbatch size and remat swept; devices of a node as lanes of one mesh, or alone.
"""

from collections.abc import Iterator, Sequence

from hexijax.planner.baselines.baseline import from_drafts, with_lanes
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block
from hexijax.planner.baselines.draft import Draft, Rules


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """Data parallelism over a pool."""
    yard = composer.yard
    pipelines = [(mesh,) for block in pool for mesh in yard.meshes(block, 1)]
    for together in with_lanes(yard, pipelines):
        yield Draft(pipelines=together, rules=Rules(uniform_remat=True))


fsdp_style = from_drafts(drafts)
