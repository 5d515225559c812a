"""Where state lies when it goes where room is left, as uneven as that is."""

from hexijax.costs.sums import (
    GRAD_BYTES,
    GROUPS_IN_FLIGHT,
    STATE_BYTES,
    flying_bytes,
)
from hexijax.layers.chain import ITEM_BYTES
from hexijax.plan.plan import Place, StateShare, stage_place
from hexijax.planner.baselines.draft import Draft
from hexijax.planner.baselines.fits import Fit, Setting
from hexijax.planner.baselines.ground import Ground
from hexijax.planner.baselines.shares import taken
from hexijax.program.buckets import shared_size

EVEN_STATE = (StateShare(groups=("*",), shares={}),)
"""Every replica's devices hold as much."""


def taken_of(
    ground: Ground, draft: Draft, size: int | None, setting: Setting
) -> list[tuple[Fit, int]] | None:
    """The fit and the samples of every replica; None: no room, or no sample for one."""
    classes = ground.ways.classes(draft.pipelines)
    fits = ground.by_class(draft.rules, classes, size, setting)
    if fits is None:
        return None
    keyed = [(ground.ways.key(pipeline), pipeline) for pipeline in draft.pipelines]
    return taken(ground.batch_size, draft.rules, keyed, fits)


def state_shares(
    ground: Ground, draft: Draft, size: int | None, setting: Setting
) -> tuple[StateShare, ...] | None:
    """State in proportion to the room left; None where there is not enough."""
    replicas = taken_of(ground, draft, size, setting)
    if replicas is None:
        return None
    shares: dict[Place, float] = {}
    for r, (pipeline, (fit, _)) in enumerate(
        zip(draft.pipelines, replicas, strict=True)
    ):
        for k, mesh in enumerate(pipeline):
            used = ground.fits.stateless_bytes(pipeline, k, fit, setting)
            room = max(mesh.block.usable_memory_bytes - used, 0)
            shares[stage_place(r, k)] = float(room * len(mesh.devices))
    need = ground.num_params * STATE_BYTES * (1 + ground.options.moments)
    item = max(ITEM_BYTES[m.shape.dtype] for p in draft.pipelines for m in p)
    at_home = GROUPS_IN_FLIGHT * max(item, GRAD_BYTES * setting.members)
    if setting.per_segment is not None:
        at_home = flying_bytes(1, 0, setting.members, item)
    need += min(ground.num_params, shared_size(ground.num_params)) * at_home
    if need > sum(shares.values()):
        return None
    return (StateShare(groups=("*",), shares=shares),)
