"""Laws of cluster documents: what is written reads back; what is broken is said so."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.cluster import Cluster, ClusterError
from tests.cluster.examples import CLUSTER_FILES, SMALL
from tests.cluster.random_clusters import random_cluster

RANDOM = st.randoms(use_true_random=False)


@pytest.fixture(scope="module", autouse=True)
def unchecked_types() -> Iterator[None]:
    """Off with the runtime type checks: nine tenths of the time here, no more found."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@given(rng=RANDOM)
def test_every_cluster_round_trips(rng: random.Random):
    cluster = random_cluster(rng)
    text = cluster.to_toml()
    assert Cluster.from_toml(text) == cluster
    assert Cluster.from_toml(text).to_toml() == text
    data = json.loads(json.dumps(cluster.to_json()))
    assert Cluster.from_json(data) == cluster
    assert Cluster.from_json(data).fingerprint() == cluster.fingerprint()


@settings(max_examples=40)
@given(rng=RANDOM)
def test_every_two_devices_are_joined_whoever_leaves(rng: random.Random):
    cluster = random_cluster(rng)
    names = [device.name for device in cluster.devices]
    gone = rng.sample(names, rng.randrange(len(names)))
    left = cluster.without(*gone)
    assert [d.name for d in left.devices] == [n for n in names if n not in gone]
    for a in left.devices:
        for b in left.devices:
            if a.name != b.name:
                assert left.link(a, b) == left.link(b, a) == cluster.link(a, b)


PROFILE = """\
format = 1
[kinds.t4-16g]
peak_tflops = { float16 = 51.5 }
layer_times = [{ layer = "block", microbatch = 4, forward_s = 0.0125 }]
[kinds.small]
base = "t4-16g"
speed = 0.5
"""
TOKENS = [
    *"=[]{},.\"'#\n",
    *(
        "[[nodes]]",
        "[kinds.x]",
        "[links]",
        "[[[[",
        '""',
        '"none"',
        '"../"',
        '"\\u0000"',
    ),
    *("true", "nan", "-inf", "0", "-1", "1e400", "1e999999999", "-1e-999999999"),
    *("0x7fffffffffffffff", "99999999999999999999", "1979-05-27", "'\u2028'"),
    *("base", "speed", "kind", "count", "absent", "latency_us", "memory_gib", "format"),
]


def mutated(text: str, rng: random.Random) -> bytes:
    """A text with a few bytes or tokens changed, dropped, doubled or swapped."""
    if rng.random() < 0.5:
        data = bytearray(text.encode())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((0, 1, 1, 9))] = rng.randbytes(rng.randrange(3))
        return bytes(data)
    parts = re.findall(r"[\w.+-]+|\s+|.", text)
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        parts[at] = rng.choice((rng.choice(TOKENS), parts[other], "", parts[at] * 2))
    return "".join(parts).encode()


def reads(load: Callable[[str], Cluster], text: str) -> bool:
    """Whether a text is a cluster; one that is survives being written."""
    try:
        cluster = load(text)
    except ClusterError:
        return False
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    return True


@pytest.mark.parametrize("what", ["cluster", "profile"])
def test_a_mutated_text_is_a_cluster_or_an_error(what: str):
    texts = [SMALL, *(path.read_text() for path in CLUSTER_FILES)]
    texts = [re.sub(r"^#.*\n", "", text, flags=re.MULTILINE) for text in texts]
    load: Callable[[str], Cluster] = Cluster.from_toml
    if what == "profile":
        texts, load = [PROFILE], Cluster.from_toml(SMALL).with_profiles
    rng = random.Random(7)
    num_read = sum(
        reads(load, mutated(rng.choice(texts), rng).decode(errors="replace"))
        for _ in range(5_500)
    )
    assert 100 < num_read < 5_000


def test_a_file_of_any_bytes_is_a_cluster_or_an_error(tmp_path: Path):
    rng, file = random.Random(7), tmp_path / "mutated.toml"
    for _ in range(200):
        file.write_bytes(mutated(SMALL, rng))
        reads(lambda _: Cluster.from_toml(file), "")
    file.write_bytes(b'format = 1\nname = "\xff"\n')
    with pytest.raises(ClusterError, match=r"mutated.toml' cannot be read: 'utf-8'"):
        Cluster.from_toml(file)
    with pytest.raises(ClusterError, match=r"cannot be read: .* Give the path"):
        Cluster.from_toml(tmp_path)


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ("format", "name", "kinds", "nodes", "links", "devices", "x")
                ),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_any_json_is_a_cluster_or_an_error(data: object):
    document = data if isinstance(data, dict) else {"nodes": data}
    for fixed in ({}, {"format": 1}, {"format": 1, "name": "x"}):
        try:
            Cluster.from_json(document | fixed)
        except ClusterError:
            continue
