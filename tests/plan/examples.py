"""A small model and small clusters, with round figures to reckon with by hand."""

from collections.abc import Sequence

from hexijax.cluster import (
    Cluster,
    DeviceGroup,
    DeviceProfile,
    LinkProfile,
    Links,
    Node,
)
from hexijax.layers.chain import Array, Chain, Group, Layer, Leaf, Remat

GIB = 2**30


def make_chain(
    num_blocks: int = 6,
    *,
    width: int = 64,
    rows: int = 48,
    head_weight: float = 1.0,
    tied: bool = False,
    block_flops: float = 1e9,
    activation_bytes: int = 2**20,
) -> Chain:
    """``embed``, ``num_blocks`` blocks and ``head``.

    Args:
      num_blocks: blocks between embed and head.
      width: columns of every kernel, split over the ``model`` axis.
      rows: rows of the embedding; its own dim 0 is split.
      head_weight: FLOPs of the head over those of a block.
      tied: the head reads the embedding's table too.
      block_flops: forward FLOPs of a block for one sample.
      activation_bytes: what a block keeps for one sample with remat none.
    """
    table = Group(
        name="embed",
        leaves=(Leaf(name="embed/table", shape=(rows, width), tensor_dim=0),),
        layers=(0, num_blocks + 1) if tied else (0,),
    )
    blocks = tuple(
        Group(
            name=f"blocks/{i}",
            leaves=(
                Leaf(name=f"blocks/{i}/scale", shape=(width,)),
                Leaf(name=f"blocks/{i}/kernel", shape=(width, width), tensor_dim=1),
            ),
            layers=(i + 1,),
        )
        for i in range(num_blocks)
    )
    head = Group(
        name="head",
        leaves=(Leaf(name="head/kernel", shape=(width, rows), tensor_dim=1),),
        layers=(num_blocks + 1,),
    )
    return Chain(
        name="toy",
        layers=(
            _layer("embed", ("embed",), block_flops / 100, activation_bytes // 8),
            *(
                _layer(group.name, (group.name,), block_flops, activation_bytes)
                for group in blocks
            ),
            _layer(
                "head",
                ("head", "embed") if tied else ("head",),
                block_flops * head_weight,
                activation_bytes,
                border_bytes=0,
            ),
        ),
        groups=(table, *blocks, head),
        batch={"tokens": Array(shape=(16,), dtype="int32")},
    )


def _layer(
    name: str,
    groups: tuple[str, ...],
    flops: float,
    kept_bytes: int,
    border_bytes: int = 2**14,
) -> Layer:
    return Layer(
        name=name,
        signature=name.split("/")[0],
        groups=groups,
        batch=("tokens",) if name in ("embed", "head") else (),
        forward_flops=flops,
        backward_flops=2 * flops,
        products=(),
        forward_bytes=float(kept_bytes),
        backward_bytes=2.0 * kept_bytes,
        border_bytes=border_bytes,
        activation_bytes={
            Remat.NONE: kept_bytes,
            Remat.DOTS: kept_bytes // 2,
            Remat.FULL: 2**14,
        },
        joined_bytes=kept_bytes,
    )


def make_kind(
    kind: str = "fast", *, tflops: float = 10.0, memory_bytes: int = 4 * GIB
) -> DeviceProfile:
    """A kind of forced CPU device that computes in float32 only."""
    return DeviceProfile(
        kind=kind,
        vendor="cpu",
        nominal_memory_bytes=memory_bytes,
        dense_flops_per_s={"float32": tflops * 1e12},
        memory_bytes_per_s=1e12,
        host_link_bytes_per_s=1e10,
    )


def make_cluster(
    nodes: Sequence[Sequence[tuple[str, int]]] = ((("fast", 4),), (("slow", 4),)),
    kinds: Sequence[DeviceProfile] | None = None,
    gb_per_s: float = 1.0,
) -> Cluster:
    """A cluster; each node is a sequence of (kind, count), named ``n0``, ``n1``, ..."""
    return Cluster(
        name="toy",
        nodes=tuple(
            Node(
                name=f"n{i}",
                devices=tuple(DeviceGroup(kind=k, count=count) for k, count in groups),
                host_memory_bytes=64 * GIB,
                host_cores=8,
            )
            for i, groups in enumerate(nodes)
        ),
        links=Links(
            in_node=LinkProfile(latency_s=5e-6, bytes_per_s=50e9),
            between_nodes=LinkProfile(latency_s=50e-6, bytes_per_s=gb_per_s * 1e9),
        ),
        profiles=tuple(kinds or (make_kind("fast"), make_kind("slow", tflops=2.5))),
    )
