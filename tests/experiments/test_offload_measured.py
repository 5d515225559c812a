"""The benchmark of host offload goes by what `hexijax profile` has written."""

from pathlib import Path

import pytest

from experiments.offloaded import cells
from experiments.offloaded.measured import of_file
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.job.profile_file import ProfileFile

CLUSTER = Cluster.from_toml(Path("experiments/clusters/h200.toml"))
KIND, NODE = CLUSTER.devices[0].kind, CLUSTER.nodes[0].name
ROW = {
    "signature": "abc",
    "dtype": "bfloat16",
    "tensor": 1,
    "samples": 2,
    "remat": "none",
    "forward_s": 0.001,
    "backward_s": 0.002,
}


def written(path: Path, **node: float) -> Path:
    """A profile file of one card."""
    file = ProfileFile.open(path, {}, {}, lambda _: None)
    file.note(
        KIND,
        card="NVIDIA H200",
        product_tflops=700,
        host_in_bytes_us=[(4096, 10), (2**28, 5000)],
        host_out_bytes_us=[(4096, 10), (2**28, 6000)],
    )
    file.set_node(NODE, **node)
    file.add_rows(KIND, [ROW], "a test")
    return path


def test_a_profile_file_says_the_benchmark_what_it_says_the_planner(tmp_path: Path):
    path = written(
        tmp_path / "p.toml",
        host_link_gb_per_s=45,
        host_out_gb_per_s=44,
        host_update_mparams_per_s=700,
    )
    found = of_file(path)
    planned = CLUSTER.with_profiles(path)
    node = planned.nodes[0]
    assert node.host_out_bytes_per_s == found["links"]["both"] == 44e9
    assert node.host_update_params_per_s == found["update_params_per_s"]
    assert found["links"]["in"] == pytest.approx(2**28 / 5e-3)
    rates = dict.fromkeys(("in", "out", "update"), 1e9)
    made = cells.cluster(12, rates=rates, rows=found["rows"])
    ours, theirs = (x.profiles[0].layer_times for x in (made, planned))
    assert ours == theirs


def test_a_profile_that_was_ended_early_is_refused_by_what_it_lacks(tmp_path: Path):
    path = written(tmp_path / "p.toml", host_link_gb_per_s=45, host_out_gb_per_s=44)
    with pytest.raises(UserError, match="has no host_update_mparams_per_s. The same"):
        of_file(path)
