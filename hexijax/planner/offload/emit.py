"""A choice as the Plan says it, and a plan whose stages are all placed.

    Plan, place -> Profile; Plan, {place: Choice} -> the same Plan, placed

Layers become segments, so that each may live elsewhere. Of a parameter group that
several stages use the first one's choice counts: its state is one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hexijax.layers.chain import Chain
from hexijax.plan.plan import (
    Memory,
    Params,
    Place,
    Plan,
    Replica,
    Stage,
    StateShare,
    UpdateOrder,
    stage_place,
)
from hexijax.planner.offload.choice import (
    Choice,
    Kept,
    LayerChoice,
    State,
    Weights,
)

PARAMS = {Weights.KEPT: Params.KEPT, Weights.STREAMED: Params.STREAMED}
HOMES = {
    State.DEVICE: (Memory.DEVICE, Memory.DEVICE),
    State.STREAMED: (Memory.HOST, Memory.DEVICE),
    State.HOST: (Memory.HOST, Memory.HOST),
}
"""Where state rests, and where it is updated."""


def placed_plan(
    plan: Plan,
    chain: Chain,
    choices: Mapping[Place, Choice],
    *,
    order: UpdateOrder = UpdateOrder.PRIORITY,
    grads: int = 0,
    leaving: int = 0,
) -> Plan:
    """The plan with some stages' layers placed; its prediction is dropped.

    Args:
      plan: whose stages are cut already.
      chain: the model.
      choices: by stage, one a layer.
      order: of updates, where any state rests on a host.
      grads: passes whose gradients have room in the placed stages; 0: all.
      leaving: chunks of state that may leave them at once; 0: the fewest.
    """
    room: Mapping[str, Any] = {"grads": grads, "leaving": leaving}
    replicas = tuple(
        dataclasses.replace(replica, stages=_stages(r, replica, choices, room))
        for r, replica in enumerate(plan.replicas)
    )
    state = _state(plan, chain, choices)
    on_host = any(share.memory is Memory.HOST for share in state)
    return dataclasses.replace(
        plan,
        replicas=replicas,
        state=state,
        order=order if on_host else plan.order,
        prediction=None,
    )


def _stages(
    r: int, replica: Replica, choices: Mapping[Place, Choice], room: Mapping[str, Any]
) -> tuple[Stage, ...]:
    return tuple(
        dataclasses.replace(placed_stage(stage, choices[place]), **room)
        if (place := stage_place(r, s)) in choices
        else stage
        for s, stage in enumerate(replica.stages)
    )


def placed_stage(stage: Stage, choice: Choice) -> Stage:
    """A stage whose every layer is a segment, as chosen; its borders wait on the host
    if some did."""
    assert len(choice) == stage.num_layers, "one choice a layer"
    return dataclasses.replace(
        stage,
        segments=(1,) * stage.num_layers,
        remat=tuple(chosen.kept.remat for chosen in choice),
        params=tuple(PARAMS[chosen.weights] for chosen in choice),
        waits=(Memory.HOST,) * len(choice) if _any_waits(stage) else (),
        residuals=tuple(
            Memory.HOST if chosen.kept is Kept.HOST else Memory.DEVICE
            for chosen in choice
        ),
    )


def _any_waits(stage: Stage) -> bool:
    """Whether borders of a stage wait in host memory: then all of them will."""
    return Memory.HOST in stage.waits


def _state(
    plan: Plan, chain: Chain, choices: Mapping[Place, Choice]
) -> tuple[StateShare, ...]:
    """The plan's shares with memories: one entry for groups that are treated alike."""
    shares: dict[str, StateShare] = {}
    rest = StateShare(groups=("*",), shares={})
    for share in plan.state:
        if share.groups == ("*",):
            rest = share
        shares |= dict.fromkeys(share.groups, share)
    found: dict[object, list[str]] = {}
    kinds: dict[object, StateShare] = {}
    for group in chain.groups:
        share = shares.get(group.name, rest)
        chosen = _chosen(plan, group.layers[0], choices)
        if chosen is not None and group.trainable:
            memory, update = HOMES[chosen.state]
            share = dataclasses.replace(share, memory=memory, update=update)
        if share == dataclasses.replace(rest, groups=share.groups):
            continue
        key = (tuple(share.shares.items()), share.memory, share.update)
        found.setdefault(key, []).append(group.name)
        kinds[key] = share
    return (
        rest,
        *(
            dataclasses.replace(kinds[key], groups=tuple(names))
            for key, names in found.items()
        ),
    )


def _chosen(
    plan: Plan, layer: int, choices: Mapping[Place, Choice]
) -> LayerChoice | None:
    """What the first placed stage that has a layer says of it."""
    for place, stage in plan.stages():
        start, stop = stage.layers
        if place in choices and start <= layer < stop:
            return choices[place][layer - start]
    return None
