"""What a worker does when it is told to."""

import dataclasses
import gc
import random
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from hexijax.islands.carrier import IslandCarrier
from hexijax.islands.transfer import TransferChannel
from hexijax.islands.world import IslandLost, World
from hexijax.runtime.communicator import Communicator
from hexijax.runtime.devices import assign
from tests.islands import cases
from tests.islands.collectives import OPERATIONS, Round, rounds

SHAPES = [
    ((), "float32"),
    ((0,), "float32"),
    ((3, 0, 2), "int32"),
    ((5,), "bfloat16"),
    ((7, 3), "bool"),
    ((1, 9), "int8"),
    ((2, 2), "uint32"),
    ((3,), "float16"),
    ((4, 2), "complex64"),
    ((9,), "float8_e4m3fn"),
    ((1025, 1023, 3), "float32"),  # more than two chunks
]


def arrays(seed: int) -> list[np.ndarray]:
    """Of many forms."""
    rng = np.random.default_rng(seed)
    return [
        np.asarray(rng.integers(0, 2, shape)).astype(jnp.dtype(dtype))
        for shape, dtype in SHAPES
    ]


def swap(
    world: World,
    channel: TransferChannel,
    *,
    seed: int,
    bytes_per_s: float | None = None,
) -> dict[str, Any]:
    """Arrays to everyone, and theirs; all islands at one rate."""
    if bytes_per_s is not None:
        channel = TransferChannel(channel._server, world, bytes_per_s=bytes_per_s)
    began = time.perf_counter()
    devices = jax.devices()
    mine, others = world.islands.index(world.name), len(world.islands)
    for i, peer in enumerate(world.islands):
        if peer != world.name:
            given = arrays(seed + mine * others + i)
            put = [jax.device_put(x, devices[k % 3]) for k, x in enumerate(given)]
            channel.offer(peer, world.transfer_id(seed, mine, i), put)
    for i, peer in enumerate(world.islands):
        if peer != world.name:
            want = arrays(seed + i * others + mine)
            like = [
                jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=SingleDeviceSharding(devices[k % 2])
                )
                for k, x in enumerate(want)
            ]
            pull = channel.pull(peer, world.transfer_id(seed, i, mine), like, "a test")
            for x, y, z in zip(pull.wait(), want, like, strict=True):
                assert x.sharding == z.sharding
                np.testing.assert_array_equal(np.asarray(x), y)
    traffic = channel.traffic
    spent_s = time.perf_counter() - began
    return {"came": {peer: t.num_bytes for peer, t in traffic.items()}, "s": spent_s}


def lost(
    world: World, channel: TransferChannel, *, peer: str, pull_s: float
) -> dict[str, Any]:
    """What becomes of a pull of something that never comes."""
    if world.name == peer:
        return {"error": ""}
    channel._world = dataclasses.replace(world, pull_s=pull_s)
    where = SingleDeviceSharding(jax.devices()[0])
    like = [jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where)]
    began = time.perf_counter()
    try:
        channel.pull(peer, world.transfer_id("lost", began), like, "recv act").wait()
    except IslandLost as error:
        return {"error": str(error), "spent_s": time.perf_counter() - began}
    raise AssertionError("it came")


def collectives(
    world: World, channel: TransferChannel, *, seed: int, count: int, most: int
) -> dict[str, Any]:
    """Random ones over devices of all islands; resident memory in between."""
    made = cases.cluster(len(world.islands))
    devices = assign(made, island=world.name)
    homes = {d: made.device(name).island for name, d in devices.items()}
    carrier = IslandCarrier(world, channel, homes, channel.next_engine())
    chosen = random.Random(seed).sample(list(devices), 5)
    members = [devices[name] for name in chosen]
    resident: list[int] = []
    for part in range(5):
        rounds(
            carrier,
            members,
            seed=seed + part,
            count=count // 5,
            most=most,
            dtype="float32",
        )
        gc.collect()
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    return {"resident_bytes": resident}


def sized(world: World, channel: TransferChannel, *, num_bytes: int) -> dict[str, Any]:
    """Every collective once, each member with about so many bytes, against NumPy."""
    made = cases.cluster(len(world.islands))
    devices = assign(made, island=world.name)
    homes = {d: made.device(name).island for name, d in devices.items()}
    carrier = IslandCarrier(world, channel, homes, channel.next_engine())
    names = [island[0] for island in made.islands.values()] + ["n0/1"]
    members = [devices[name] for name in names]
    group = Communicator(members, carrier, name=f"of {num_bytes}")
    spent: dict[str, float] = {}
    for operation in OPERATIONS:
        rng = random.Random(num_bytes)
        given = ["float32"] * len(members)
        each = num_bytes // 4 if operation == "all_gather" else num_bytes // 12
        made_round = Round(rng, len(members), each, operation, given, exact=True)
        began = time.perf_counter()
        made_round.run(group, members)
        spent[operation] = time.perf_counter() - began
    return {"spent_s": spent}


def train(
    world: World, channel: TransferChannel, *, islands: int, seed: int, whole: bool
) -> dict[str, Any]:
    """A step of a random plan; ``whole``: two, and an evaluation."""
    made = cases.cluster(islands)
    devices = assign(made, island=world.name)
    homes = {d: made.device(name).island for name, d in devices.items()}
    carrier = IslandCarrier(world, channel, homes, channel.next_engine())
    engine = cases.make(islands, seed, devices, carrier)
    found = cases.outcome(engine, seed, whole=whole)
    for buffer in engine.live_buffers():
        for x in jax.tree.leaves(engine._executor.get(buffer)):
            assert all(map(carrier.here, x.sharding.device_set)), (world.name, buffer)
    found["came"] = sum(t.num_bytes for t in channel.traffic.values())
    found["versions"] = [jax.__version__, sys.version]
    found["waited_s"] = sum(t.waited_s for t in channel.traffic.values())
    return found
