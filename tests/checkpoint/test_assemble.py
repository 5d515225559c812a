"""What was cut one way comes back cut another, from whoever holds it."""

import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hexijax.checkpoint.assemble import Missing, assemble
from hexijax.checkpoint.slices import Key, Slice, Tensor, whole_slice
from hexijax.checkpoint.sources import Held, live_sources
from hexijax.weights.source import box_shape, index, overlap, whole
from hexijax.weights.stored.parts import without

SHAPE = (6, 8)
KEY, COUNT = Key("blocks/0/w", "0/mu"), Key("", "0/count")
WHOLE = np.arange(48, dtype=np.float32).reshape(SHAPE)

Targets = dict[Slice, list[jax.ShapeDtypeStruct]]
Arrays = Mapping[Slice, Sequence[jax.Array]]


class Cut:
    """An engine with one moment cut in runs of rows, each on a mesh of its own."""

    def __init__(self, *runs: tuple[int, int], first: int = 0):
        devices = jax.devices()
        self.likes: Targets = {}
        for at, (start, stop) in enumerate(runs):
            two = [devices[(first + 2 * at + i) % 8] for i in range(2)]
            mesh = Mesh(np.array(two), ("model",))
            split = NamedSharding(mesh, PartitionSpec(None, "model"))
            each = NamedSharding(mesh, PartitionSpec())
            box = ((start, stop), (0, 8))
            like = jax.ShapeDtypeStruct(box_shape(box), "float32", sharding=split)
            self.likes[Slice(*KEY, box)] = [like]
            count = jax.ShapeDtypeStruct((), "int32", sharding=each)
            self.likes.setdefault(whole_slice(COUNT, ()), []).append(count)
        self.arrays: Arrays = {}

    def fill(self) -> "Cut":
        self.arrays = {
            each: [
                jax.device_put(
                    WHOLE[index(each.box)] if each.name else np.int32(7), like.sharding
                )
                for like in copies
            ]
            for each, copies in self.likes.items()
        }
        return self

    def slices(self) -> Arrays:
        return self.arrays

    def targets(self) -> Targets:
        return self.likes

    def tensors(self) -> dict[Key, Tensor]:
        return {
            KEY: Tensor(SHAPE, np.dtype("float32")),
            COUNT: Tensor((), np.dtype("int32")),
        }

    def load(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def stored_params(self) -> list:
        return []


def check(engine: Cut) -> None:
    for each, copies in engine.targets().items():
        for like, array in zip(copies, engine.slices()[each], strict=True):
            assert (array.sharding, array.dtype) == (like.sharding, like.dtype)
            want = WHOLE[index(each.box)] if each.name else 7
            np.testing.assert_array_equal(array, want)


NODES = {device: f"n{i // 2}" for i, device in enumerate(jax.devices())}


@given(
    runs=st.lists(st.integers(1, 5), unique=True, max_size=3), first=st.integers(0, 7)
)
def test_any_cut_comes_back_as_any_other(runs: list[int], first: int):
    edges = [0, *sorted(runs), 6]
    saved = Cut((0, 2), (2, 3), (3, 6)).fill()
    other = Cut(*itertools.pairwise(edges), first=first)
    arrays, moved = assemble(other.targets(), live_sources(saved, NODES))
    other.load(arrays)
    check(other)
    assert moved.num_bytes == {"device": WHOLE.nbytes + 4}
    assert "0.000 GB from device in" in str(moved)


def test_a_lost_node_is_never_read_and_what_it_held_comes_from_elsewhere():
    saved = Cut((0, 2), (2, 6)).fill()  # the rows from 2 on devices 2 and 3
    lives = {d: n for d, n in NODES.items() if n != "n1"}
    sources = live_sources(saved, lives)
    assert [source.node for source in sources] == ["n0"]
    target = Cut((0, 6), first=4)
    with pytest.raises(Missing) as error:
        assemble(target.targets(), sources)
    assert str(error.value) == (
        "blocks/0/w 0/mu [2:6,0:4] is held by none of 1 sources (device n0)."
    )
    copy = Held(arrays={whole_slice(KEY, SHAPE): WHOLE}, node="n3")
    arrays, moved = assemble(target.targets(), [*sources, copy])
    target.load(arrays)
    check(target)
    assert moved.num_bytes == {"device": 2 * 8 * 4 + 4, "peer": 4 * 8 * 4}


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 4)), max_size=3
    )
)
def test_a_box_without_another_is_tiled(dims: list[tuple[int, int, int]]):
    box = tuple((a, a + n + m) for a, n, m in dims)
    hole = tuple((a, a + n) for a, n, _ in dims)
    seen = np.zeros([stop for _, stop in box], int)
    for part in [hole, *without(box, hole)]:
        assert overlap(part, box) == part
        seen[index(part)] += 1
    assert (seen[index(box)] == 1).all()
    assert whole(()) == ()
