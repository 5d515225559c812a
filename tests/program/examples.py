"""Chains and plans made without JAX, for tests of what comes after tracing."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from hexijax.layers.chain import Array, Chain, Group, Layer, Leaf, Remat
from hexijax.plan.plan import Memory, Params, Plan, Replica, Schedule, Stage


def make_chain(
    num_layers: int,
    *,
    tied: Mapping[str, Sequence[int]] | None = None,
    sizes: Sequence[int] | None = None,
    frozen: Collection[str] = (),
) -> Chain:
    """A chain of layers ``l0``, ``l1``, ... with one kernel and one bias each.

    Args:
      num_layers: layers; the first and the last read the batch.
      tied: further groups by name, each used by the layers listed.
      sizes: rows of each layer's kernel; the kernels have 64 columns.
      frozen: names of leaves that do not train.
    """
    tied = tied or {}
    sizes = sizes or [64] * num_layers
    groups = [
        Group(
            name=f"l{i}",
            leaves=(
                Leaf(name=f"l{i}/kernel", shape=(sizes[i], 64), tensor_dim=1),
                Leaf(name=f"l{i}/bias", shape=(64,), tensor_dim=0),
            ),
            layers=(i,),
        )
        for i in range(num_layers)
    ]
    shared = [
        Group(
            name=name,
            leaves=(Leaf(name=f"{name}/table", shape=(512, 64), tensor_dim=0),),
            layers=tuple(sorted(layers)),
        )
        for name, layers in tied.items()
    ]
    split = [part for g in (*groups, *shared) for part in _parts(g, frozen)]
    names = [[g.name for g in split if i in g.layers] for i in range(num_layers)]
    chain = Chain(
        name="example",
        layers=tuple(
            _layer(i, num_layers, names[i], sizes[i]) for i in range(num_layers)
        ),
        groups=tuple(sorted(split, key=lambda g: g.layers[0])),
        batch={"tokens": Array(shape=(16,), dtype="int32")},
    )
    layers = enumerate(chain.layers)
    run = (x if i >= chain.first_trained else without_backward(x) for i, x in layers)
    return dataclasses.replace(chain, layers=tuple(run))


def without_backward(layer: Layer) -> Layer:
    """A layer before the first that trains."""
    return dataclasses.replace(
        layer,
        backward=False,
        backward_flops=0.0,
        backward_bytes=0.0,
        activation_bytes=dict.fromkeys(Remat, 0),
        handed_bytes=0,
        reads_input=(),
    )


def _parts(group: Group, frozen: Collection[str]) -> list[Group]:
    """A group's leaves that train, and those that do not."""
    parts = [
        tuple(
            dataclasses.replace(leaf, trainable=trains)
            for leaf in group.leaves
            if (leaf.name not in frozen) is trains
        )
        for trains in (True, False)
    ]
    still = group.name + ".frozen" * bool(parts[0])
    return [
        dataclasses.replace(group, name=name, leaves=leaves)
        for name, leaves in zip((group.name, still), parts, strict=True)
        if leaves
    ]


def make_stages(
    splits: Sequence[int],
    *,
    prefix: str = "a",
    tensor: int = 1,
    lanes: int = 1,
    segments: Sequence[Sequence[int]] | None = None,
    num_sets: int | None = None,
    freed: bool = False,
    waits: bool = False,
) -> tuple[Stage, ...]:
    """Stages of ``splits`` layers on devices ``a/0``, ``a/1``, ...

    Args:
      splits: layers of each stage.
      prefix: name of the node.
      tensor: tensor degree of every stage.
      lanes: data degree of every stage.
      segments: layers of the segments of each stage.
      num_sets: device sets that the stages take in turn; None: one each.
      freed: every segment frees its parameters after each pass.
      waits: every border inside a stage waits in host memory.
    """
    stages, start, width = [], 0, tensor * lanes
    for k, num_layers in enumerate(splits):
        first = (k % (num_sets or len(splits))) * width
        stages.append(
            Stage(
                devices=tuple(f"{prefix}/{first + i}" for i in range(width)),
                layers=(start, start + num_layers),
                lanes=lanes,
                tensor=tensor,
                segments=(each := tuple(segments[k]) if segments else (num_layers,)),
                params=(Params.FREED,) * len(each) if freed else (),
                waits=(Memory.HOST,) * len(each) if waits else (),
            )
        )
        start += num_layers
    return tuple(stages)


def make_plan(
    *replicas: tuple[tuple[Stage, ...], int],
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    **fields: object,
) -> Plan:
    """A plan of (stages, microbatches) with one sample a microbatch and lane."""
    made = []
    for stages, microbatches in replicas:
        size = max(stage.lanes for stage in stages)
        made.append(
            Replica(
                stages=stages,
                microbatches=microbatches,
                microbatch_size=size,
                samples=size * microbatches,
            )
        )
    batch_size = sum(replica.samples for replica in made)
    return Plan(
        replicas=tuple(made), batch_size=batch_size, schedule=schedule, **fields
    )


def _layer(index: int, num_layers: int, groups: list[str], rows: int) -> Layer:
    last = index == num_layers - 1
    return Layer(
        name=f"l{index}",
        signature=f"rows {rows}",
        groups=tuple(groups),
        batch=("tokens",) if index == 0 or last else (),
        forward_flops=2.0 * rows * 64,
        backward_flops=4.0 * rows * 64,
        products=(),
        forward_bytes=4.0 * rows * 64,
        backward_bytes=8.0 * rows * 64,
        border_bytes=0 if last else 256,
        activation_bytes={Remat.NONE: 1024, Remat.DOTS: 512, Remat.FULL: 256},
        joined_bytes=512,
    )
