"""docs/cluster.md names every key, and its examples are what it says."""

import re
from pathlib import Path

import pytest

from hexijax.cluster import Cluster
from hexijax.cluster.link import LINK
from hexijax.cluster.links import LINKS, NAMED_LINK
from hexijax.cluster.node import GROUP, NODE
from hexijax.cluster.profile import PROFILE
from hexijax.cluster.record import Record

DOCS = Path(__file__).parents[2].joinpath("docs/cluster.md").read_text(encoding="utf-8")


def test_the_examples_are_a_cluster_and_its_profile():
    cluster_text, profile_text = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
    cluster = Cluster.from_toml(cluster_text)
    assert [device.name for device in cluster.devices] == [
        *("big/0", "big/1", "big/2", "small/0", "small/1", "small/2", "far/0")
    ]
    assert cluster.link("small/0", "small/1").bytes_per_s == 50e9
    assert cluster.link("far/0", "big/0").latency_s == 400e-6
    measured = cluster.with_profiles(profile_text)
    assert measured.device("big/0").profile.dense_flops_per_s["bfloat16"] == 800e12


@pytest.mark.parametrize(
    "record", [PROFILE, GROUP, NODE, LINK, NAMED_LINK, LINKS], ids=lambda r: r.what
)
def test_every_key_is_described(record: Record):
    for key in record.keys:
        assert re.search(rf"\b{key.name}\b", DOCS), key.name
