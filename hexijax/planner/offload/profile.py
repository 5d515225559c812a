"""One layer's times and bytes, from the cost model: measured tables where there are.

chain, cluster, Stage, samples -> stage_profile -> Profile
"""

import dataclasses

from hexijax.cluster import Cluster
from hexijax.costs.activations import (
    BORDERS_IN_FLIGHT,
    Within,
    batch_bytes,
    enter_bytes,
    held_bytes,
    segment_kept_bytes,
    within_bytes,
)
from hexijax.costs.compute import fused_attention, layer_times
from hexijax.costs.host_rates import host_side
from hexijax.costs.instructions import mesh_shape
from hexijax.costs.measured import update_s_per_param
from hexijax.costs.memory import room_bytes
from hexijax.costs.rates import CALL_S
from hexijax.costs.sums import (
    STATE_BYTES,
    chunks_on_device,
    leaf_shard,
    shard_size,
)
from hexijax.costs.temp import Temps
from hexijax.layers.chain import ITEM_BYTES, Chain, Group, Remat
from hexijax.plan.plan import CHUNK_SIZE, Memory, Stage
from hexijax.planner.offload.choice import GRAD_BYTES, LayerProfile, Profile
from hexijax.program.buckets import chunks
from hexijax.program.program import Site
from hexijax.program.resting import count_arrays, used_as

WAITING = 4
"""Borders that come from the host and go there at once, activations and cotangents."""


def stage_profile(
    chain: Chain,
    cluster: Cluster,
    stage: Stage,
    *,
    samples: int,
    microbatches: int,
    moments: int,
    device_bytes: int | None = None,
    live: int = 1,
    layered: bool = False,
    grads_stay: bool = False,
    early_updates: bool = True,
    leaving: int = 0,
    chunk: int = CHUNK_SIZE,
    temps: Temps | None = None,
) -> Profile:
    """The layers of a stage, each a segment of its own.

    Layered, a layer takes all microbatches before the next one begins: what passes for
    a layer passes once a step, and all microbatches' residuals wait together.

    Args:
      chain: the model.
      cluster: where the stage's devices are.
      stage: its devices, layers, lanes and dtype count, and whether borders wait on
        the host; what else it says of remat and placement does not. Its lanes share
        each parameter's state.
      samples: of one lane's microbatch.
      microbatches: of a step.
      moments: fp32 arrays of the optimizer for each parameter, the master left out.
      live: microbatches whose residuals wait together.
      layered: microbatches go through a layer one after another.
      grads_stay: room is kept for all gradients at once.
      device_bytes: what a device may use; None: its usable memory.
      early_updates: nothing forbids an update before the last backward.
      leaving: chunks of state that may be on their way to the host; 0: the fewest.
      chunk: about the most parameters of one.
      temps: what compiled segments were seen to need.
    """
    device = cluster.device(stage.devices[0])
    mesh = mesh_shape(cluster, stage)
    times = layer_times(chain, mesh, samples)
    start, stop = stage.layers
    length = stop - start
    fused = fused_attention(device.profile, stage.dtype)
    layers = chain.layers_under(fused_attention=fused)
    within = Within(profile=device.profile, layers=layers, temps=temps or Temps())
    policies = {
        policy: dataclasses.replace(
            stage, segments=(1,) * length, remat=(policy,) * length
        )
        for policy in Remat
    }
    item = ITEM_BYTES[stage.dtype]
    update_s = update_s_per_param(device.profile) or (
        (2 * STATE_BYTES * (1 + moments) + GRAD_BYTES + item)
        / mesh.rate.memory_bytes_per_s
    )
    link, rounds = mesh.link, microbatches if layered else 1
    waits = Memory.HOST in stage.waits
    widest = max(
        enter_bytes(chain, i, stage.dtype, samples) for i in range(start, stop)
    )
    live = max(live, rounds)
    found: list[LayerProfile] = []
    for i in range(start, stop):
        last = i == stop - 1
        own = _own_params(chain, stage, i)
        homed = -(-own // stage.lanes)
        cut = _chunks(chain, stage, i, moments, chunk)
        held = held_bytes(chain, (i, i + 1), stage.tensor, stage.dtype)
        shared_s = (
            own * (stage.lanes - 1) / stage.lanes / link.bytes_per_s
            if link and stage.lanes > 1
            else 0.0
        )
        border = enter_bytes(chain, i, stage.dtype, samples)
        found.append(
            LayerProfile(
                name=chain.layers[i].name,
                forward_s={
                    p: rounds * (CALL_S + times[i].forward(p, joined=last))
                    for p in Remat
                },
                backward_s={
                    p: rounds * (CALL_S + times[i].backward(p, joined=last))
                    for p in Remat
                },
                recompute_s={p: rounds * times[i].recompute_s[p] for p in Remat},
                resident_update_s=CALL_S + homed * update_s if own else 0.0,
                num_params=own,
                homed_params=homed,
                weights_bytes=_own_weights(chain, stage, i, held.handed),
                grads_bytes=own * GRAD_BYTES,
                state_bytes=homed * STATE_BYTES * (1 + moments),
                chunk_bytes=-(-cut.largest // stage.lanes)
                * STATE_BYTES
                * (1 + moments),
                state_pieces=cut.state,
                weights_pieces=cut.leaves,
                kept_pieces=rounds,
                kept_bytes={
                    p: (0 if waits else live * border)
                    # What the loss keeps, its backward uses at once.
                    + (1 if last and i == len(layers) - 1 else live)
                    * segment_kept_bytes(chain, layers, i, i + 1, policies[p], samples)
                    for p in Remat
                },
                working_bytes={
                    p: within_bytes(chain, within, policies[p], samples, i - start)
                    for p in Remat
                },
                reduce_s=shared_s * GRAD_BYTES,
                gather_s=shared_s * item,
                last_user=_last_user(chain, stage, i),
            )
        )
    edges = sum(enter_bytes(chain, at, stage.dtype, samples) for at in stage.layers)
    batch = batch_bytes(chain, start, stop, samples)
    return Profile(
        layers=tuple(found),
        host=host_side(cluster, device.name),
        device_bytes=room_bytes(device) if device_bytes is None else device_bytes,
        fixed_bytes=BORDERS_IN_FLIGHT * (edges + batch)
        + rounds * batch
        + (WAITING * widest if waits else 0),
        microbatches=1 if layered else microbatches,
        grads_stay=grads_stay,
        early_updates=early_updates,
        chunks=chunks_on_device(leaving),
    )


def _own_params(chain: Chain, stage: Stage, layer: int) -> int:
    """Parameters that train and that no layer of the stage before it uses."""
    return sum(
        leaf_shard(leaf, stage.tensor)
        for name in chain.layers[layer].groups
        for leaf in chain.group(name).leaves
        if leaf.trainable and _is_first(chain, stage, name, layer)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunks:
    """What a layer's state is cut into where it rests in host memory."""

    largest: int
    """Parameters of the largest, all lanes together."""
    state: int
    """Arrays in which all of it comes."""
    leaves: int
    """Arrays of parameters."""


def _chunks(chain: Chain, stage: Stage, layer: int, moments: int, size: int) -> _Chunks:
    """Of parameters that train and that no layer of the stage before it uses."""
    groups = [
        each
        for name in chain.layers[layer].groups
        if _is_first(chain, stage, name, layer) and chain.group(name).trainable
        for each in chunks(chain.group(name), size, lanes=stage.lanes)
    ]
    return _Chunks(
        largest=max((shard_size(x, stage.tensor) for x in groups), default=0),
        state=sum(_state_arrays(chain, stage, group, moments) for group in groups),
        leaves=sum(len(group.leaves) for group in groups),
    )


def _state_arrays(chain: Chain, stage: Stage, group: Group, moments: int) -> int:
    return sum(
        count_arrays(
            [leaf.size for leaf in group.leaves],
            [leaf.dtype == "float32" for leaf in group.leaves],
            [used_as(chain, stage, x, group) != x.dtype for x in group.leaves],
            site=Site.STREAMED,
            devices=len(stage.devices),
            moments=moments,
        )
    )


def _own_weights(chain: Chain, stage: Stage, layer: int, handed: int) -> int:
    """Bytes that the layer is handed, less what one before it in the stage is, too."""
    shared = [
        leaf
        for name in chain.layers[layer].groups
        if not _is_first(chain, stage, name, layer)
        for leaf in chain.group(name).leaves
    ]
    item = ITEM_BYTES[stage.dtype]
    return max(0, handed - sum(leaf.size // stage.tensor * item for leaf in shared))


def _is_first(chain: Chain, stage: Stage, group: str, layer: int) -> bool:
    users = (i for i in chain.group(group).layers if i >= stage.layers[0])
    return next(users) == layer


def _last_user(chain: Chain, stage: Stage, layer: int) -> int | None:
    """Of a layer's own tied parameters, counted from the stage's first layer."""
    start, stop = stage.layers
    users = [
        i
        for name in chain.layers[layer].groups
        if _is_first(chain, stage, name, layer)
        for i in chain.group(name).layers
        if i < stop
    ]
    last = max(users, default=layer)
    return last - start if last > layer else None
