"""Profiles of a few equal layers, drawn or asked for, without a model."""

import dataclasses
import random

from hexijax.costs.host_rates import HostSide
from hexijax.layers.chain import Remat
from hexijax.planner.offload.choice import (
    GRAD_BYTES,
    Kept,
    LayerChoice,
    LayerProfile,
    Profile,
    State,
    Weights,
)
from hexijax.planner.offload.room import Room

MIB = 2**20

HOST = HostSide(
    in_bytes_per_s=50e9,
    out_bytes_per_s=45e9,
    return_bytes_per_s=7e9,
    update_params_per_s=2e9,
    memory_bytes=2**37,
    has_pinned=True,
    source="drawn",
)


def block(
    *, params: int = 200 * MIB, pass_s: float = 0.01, kept_bytes: int = 1500 * MIB
) -> LayerProfile:
    """A transformer block, about."""
    shares = {Remat.NONE: 1.0, Remat.DOTS: 0.4, Remat.FULL: 0.05}
    more = {Remat.NONE: 0.05, Remat.DOTS: 0.0, Remat.FULL: 0.7}
    return LayerProfile(
        name="block",
        forward_s=dict.fromkeys(Remat, pass_s),
        backward_s={p: (2 + more[p]) * pass_s for p in Remat},
        recompute_s={p: more[p] * pass_s for p in Remat},
        resident_update_s=params * 32 / 2.5e12,
        num_params=params,
        homed_params=params,
        weights_bytes=2 * params,
        grads_bytes=GRAD_BYTES * params,
        state_bytes=12 * params,
        chunk_bytes=12 * params // 12,
        kept_bytes={p: int(kept_bytes * share) for p, share in shares.items()},
        working_bytes=dict.fromkeys(Remat, kept_bytes // 2),
    )


def profile(
    depth: int, *, room: float, host: HostSide = HOST, pass_s: float = 0.01
) -> Profile:
    """Equal blocks on a device with a share of what lies between the least they need
    and all they would take."""
    made = Profile(
        layers=(block(pass_s=pass_s),) * depth, host=host, device_bytes=2**60
    )
    most = Room(made, (LayerChoice(),) * depth)
    least = Room(
        made,
        (LayerChoice(weights=Weights.STREAMED, state=State.STREAMED, kept=Kept.FULL),)
        * depth,
    )
    low, high = least.peak_bytes(least.least_limit_bytes), most.peak_bytes(2**60)
    return dataclasses.replace(made, device_bytes=int(low + room * (high - low)))


def drawn(seed: int, *, most: int = 3) -> Profile:
    """A profile of up to ``most`` blocks and any rates."""
    rng = random.Random(seed)
    host = dataclasses.replace(
        HOST,
        in_bytes_per_s=rng.choice([5e9, 12e9, 25e9, 50e9, 200e9]),
        out_bytes_per_s=rng.choice([5e9, 12e9, 25e9, 45e9]),
        update_params_per_s=rng.choice([0.3e9, 1e9, 2e9, 6e9]),
        memory_bytes=rng.choice([2**33, 2**34, 2**40]),
    )
    return profile(rng.randint(2, most), room=rng.random(), host=host)
