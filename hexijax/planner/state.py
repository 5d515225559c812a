"""Where optimizer state lies when even parts do not fit: water, filled in to the brim.

    plan, room on each device -> state_shares -> (StateShare, ...), or None
    plan, a weight for each replica -> weighted_shares -> (StateShare, ...)

What a device computes and what it stores are two numbers (Cephalo, arXiv 2411.01075).
State rises at one level over the devices that compute with it. A device that is full
stays so, the others rise on; what is then left goes to devices with room that compute
with other layers, or with none at all. So state is even wherever there is room for it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.sums import STATE_BYTES
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan, StateShare, stage_place
from hexijax.program.boxes import users

EVEN = (StateShare(groups=("*",), shares={}),)
"""Over the devices that compute with it."""

UNIT_BYTES = 2**20
"""Shares are whole MiB: they are read by people."""

_FULL = 1.0
"""Bytes of room that are none."""


@dataclasses.dataclass(slots=True)
class _Pool:
    """State that the same stages compute with."""

    groups: list[str]
    """Names of the parameter groups."""

    users: tuple[Place, ...]
    """The stages."""

    left_bytes: float
    """Still without a home."""

    held_bytes: dict[Place, float]
    """By home."""


def state_shares(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    room_bytes: Mapping[str, float],
    *,
    moments: int,
) -> tuple[StateShare, ...] | None:
    """Shares of state that fit, even wherever they can be.

    Args:
      plan: whose own shares are not looked at.
      chain: the model.
      cluster: the devices, unused ones too.
      room_bytes: what each device has left for state.
      moments: fp32 arrays of the optimizer for each parameter, the master left out.

    Returns:
      None where the devices' room together is too little.
    """
    devices = {place: stage.devices for place, stage in plan.stages()}
    used = {name for names in devices.values() for name in names}
    idle = [d.name for d in cluster.devices if d.name not in used]
    devices |= {Place(name): (name,) for name in idle}
    pools = _pools(plan, chain, moments)
    room = {name: max(0.0, room_bytes.get(name, 0.0)) for name in (*used, *idle)}
    even = {
        id(pool): pool.left_bytes / sum(len(devices[p]) for p in pool.users)
        for pool in pools
    }
    _rise(pools, {id(pool): pool.users for pool in pools}, even, devices, room)
    over = [pool for pool in pools if pool.left_bytes > _FULL]
    everywhere = tuple(devices)
    _rise(
        over,
        {id(pool): everywhere for pool in over},
        {id(pool): pool.left_bytes for pool in over},
        devices,
        room,
    )
    if any(pool.left_bytes > _FULL for pool in pools):
        return None
    return _shares(pools, devices)


def weighted_shares(
    plan: Plan, chain: Chain, weights: Sequence[float]
) -> tuple[StateShare, ...]:
    """State over the devices that compute with it, more with some replicas.

    Args:
      plan: whose own shares are not looked at.
      chain: the model.
      weights: of each replica, any scale; where all that compute with something weigh
        nothing, they have even parts of it.
    """
    devices = {place: stage.devices for place, stage in plan.stages()}
    replica_of = {
        stage_place(r, s): r
        for r, replica in enumerate(plan.replicas)
        for s in range(len(replica.stages))
    }
    pools = _pools(plan, chain, 0)
    for pool in pools:
        held = {p: weights[replica_of[p]] * len(devices[p]) for p in pool.users}
        total = sum(held.values())
        if total:
            pool.held_bytes = {
                p: pool.left_bytes * part / total for p, part in held.items()
            }
    return _shares([pool for pool in pools if pool.held_bytes], devices)


def _pools(plan: Plan, chain: Chain, moments: int) -> list[_Pool]:
    found: dict[tuple[Place, ...], _Pool] = {}
    for group in chain.groups:
        if not group.trainable:
            continue
        places = users(plan, group)
        pool = found.setdefault(
            places, _Pool(groups=[], users=places, left_bytes=0.0, held_bytes={})
        )
        pool.groups.append(group.name)
        pool.left_bytes += group.size * STATE_BYTES * (1 + moments)
    return [*found.values()]


def _rise(
    pools: Sequence[_Pool],
    homes: Mapping[int, tuple[Place, ...]],
    rates: Mapping[int, float],
    devices: Mapping[Place, tuple[str, ...]],
    room: dict[str, float],
) -> None:
    """Fills ``room`` until each pool has its homes or they are full.

    Args:
      pools: what is to be stored.
      homes: where, by the pool's id.
      rates: bytes of a pool by which each device rises at a time.
      devices: of each place; all of a place's devices hold as much.
      room: left on each device; grows less.
    """
    while True:
        open_at = {
            id(pool): [
                place
                for place in homes[id(pool)]
                if all(room[name] > _FULL for name in devices[place])
            ]
            for pool in pools
            if pool.left_bytes > _FULL
        }
        rising = [pool for pool in pools if open_at.get(id(pool))]
        if not rising:
            return
        speed: dict[str, float] = {}
        step = math.inf
        for pool in rising:
            own = 0.0
            for place in open_at[id(pool)]:
                for name in devices[place]:
                    speed[name] = speed.get(name, 0.0) + rates[id(pool)]
                    own += rates[id(pool)]
            step = min(step, pool.left_bytes / own)
        step = min(step, *(room[name] / each for name, each in speed.items()))
        for pool in rising:
            for place in open_at[id(pool)]:
                risen = step * rates[id(pool)] * len(devices[place])
                pool.held_bytes[place] = pool.held_bytes.get(place, 0.0) + risen
                pool.left_bytes -= risen
        for name, each in speed.items():
            room[name] -= step * each


def _shares(
    pools: Sequence[_Pool], devices: Mapping[Place, tuple[str, ...]]
) -> tuple[StateShare, ...]:
    """One entry for pools that are divided alike; what is even needs none."""
    found: dict[tuple[tuple[Place, float], ...], list[str]] = {}
    for pool in pools:
        each = {
            pool.held_bytes.get(place, 0.0) / len(devices[place])
            for place in pool.users
        }
        if pool.held_bytes.keys() <= set(pool.users) and max(each) - min(each) <= _FULL:
            continue
        parts = tuple(
            (place, float(max(1, round(held / UNIT_BYTES))))
            for place, held in pool.held_bytes.items()
            if held > _FULL
        )
        found.setdefault(parts, []).extend(pool.groups)
    return (
        *EVEN,
        *(
            StateShare(groups=tuple(groups), shares=dict(parts))
            for parts, groups in found.items()
        ),
    )
