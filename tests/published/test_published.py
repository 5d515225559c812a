"""Readers of public measurements, held against the records themselves."""

import json
from pathlib import Path

import pytest

from hexijax.costs import MeshShape, layer_times
from hexijax.plan.checks import check
from hexijax.published import cephalo, hexiscale, sailor
from hexijax.published.files import PublishedDataError, read
from hexijax.published.sailor.links import between_nodes, in_node
from tests.public_data import FOLDER, needs_public_data

pytestmark = needs_public_data
MODEL = "OPT-350"


def test_a_chain_holds_every_degrees_parameters():
    chain = sailor.model_chain(FOLDER, MODEL)
    for record in read(FOLDER, "sailor", "models")["records"]:
        if record["model"] == MODEL:
            held = [
                sum(
                    leaf.size // (1 if leaf.tensor_dim is None else record["tp"])
                    for leaf in group.leaves
                )
                for group in chain.groups
            ]
            assert held == record["params"]


def test_layer_times_are_the_records_where_these_rise():
    chain = sailor.model_chain(FOLDER, MODEL)
    titan = sailor.profile(FOLDER, "Titan-RTX")
    times = layer_times(chain, MeshShape(profile=titan, dtype="float32", tensor=8), 2)
    (record,) = (
        r
        for r in read(FOLDER, "sailor", "layer_times")["records"]
        if (r["model"], r["gpu"], r["tp"], r["mbs"]) == (MODEL, "Titan-RTX", 8, 2)
    )
    assert [time.forward_s for time in times] == record["fwd_s"]
    assert [time.backward_s for time in times] == record["bwd_s"]


def test_launches_timed_with_small_microbatches_are_not_believed():
    """GH200 at degree 4: one sample is timed slower than two."""
    chain = sailor.model_chain(FOLDER, MODEL)
    gh200 = sailor.profile(FOLDER, "GH-96")
    mesh = MeshShape(profile=gh200, dtype="float32", tensor=4)
    one, two = (layer_times(chain, mesh, samples) for samples in (1, 2))
    assert one[2].forward_s == two[2].forward_s == 0.001509


def test_cards_of_a_node_share_what_was_measured_of_all_at_once():
    link = between_nodes(FOLDER, "GH-96", "GH-96", 4)
    assert link.bytes_per_s == pytest.approx(92.5e9, rel=0.01)
    assert link.flow_bytes_per_s == pytest.approx(22.9e9, rel=0.01)
    # On PCIe nodes with a plain network card one pair takes as much as eight.
    titan = between_nodes(FOLDER, "Titan-RTX", "Titan-RTX", 8)
    assert titan.flow_bytes_per_s == pytest.approx(titan.bytes_per_s, rel=0.1)


def test_a_suspect_link_is_read_from_its_sound_counts():
    link = between_nodes(FOLDER, "Titan-RTX", "RTX-2080", 8)
    assert link.bytes_per_s == pytest.approx(2.83e9, rel=0.01)


def test_what_was_not_measured_is_refused_by_name():
    with pytest.raises(PublishedDataError) as error:
        in_node(FOLDER, "RTX-3090", 3)
    assert str(error.value) == (
        "The link between 3 RTX-3090 of a node was asked for; links.json has RTX-3090 "
        "nodes of 2, 4, 8. Use one of these sizes."
    )
    with pytest.raises(PublishedDataError, match="A link that was not measured is"):
        between_nodes(FOLDER, "GH-96", "RTX-3090", 4)
    assert between_nodes(FOLDER, "Titan-RTX", "RTX-2080", 1).bytes_per_s > 2e9
    with pytest.raises(PublishedDataError, match="The model 'OPT-13' was asked for"):
        sailor.model_chain(FOLDER, "OPT-13")
    with pytest.raises(PublishedDataError, match="The card 'H100' was asked for"):
        sailor.profile(FOLDER, "H100")


def test_every_measured_plan_is_a_plan_of_its_cluster():
    for case in sailor.measured_cases(FOLDER):
        check(case.plan, case.chain, case.cluster)
        record = case.record
        assert len(case.cluster.devices) == record["num_gpus"]
        assert case.plan.batch_size == record["global_batch"]
        for replica in case.plan.replicas:
            layers = [stage.num_layers for stage in replica.stages]
            assert layers == record["layers_per_stage"]
            assert replica.microbatches == record["num_microbatches"]


def test_published_plans_keep_the_batch_exact_and_say_so():
    by_name = {case.name: case for case in sailor.published_cases(FOLDER)}
    for case in by_name.values():
        check(case.plan, case.chain, case.cluster)
    assert by_name["4+12_sailor"].notes == (
        "the source rounds the batch of 1024 up to 1036 sequences; here it is exact, "
        "and the last microbatches are padded",
    )
    unlike = by_name["8+8_sailor"].plan
    assert {r.stages[0].tensor for r in unlike.replicas} == {1, 4}


def test_cephalos_best_splits_cost_what_the_records_say():
    cases = cephalo.golden_cases(FOLDER)
    for case in cases:
        splits = zip(
            case.devices, case.optimal_sizes, case.optimal_samples, strict=True
        )
        cycles_s = [d.cycle_s(size, samples // size) for d, size, samples in splits]
        assert max(cycles_s) == pytest.approx(case.optimal_cycle_s, abs=1e-9)
    with pytest.raises(PublishedDataError, match="it was measured on a6000"):
        cephalo.latency(FOLDER, "h200", "deepspeedgpt_2.7b", "float16", 512)


def test_hexiscales_clusters_have_the_flops_they_were_matched_by():
    for case in hexiscale.cases(FOLDER):
        if case.gap_mfu is not None:
            for cluster, key in (
                (case.cluster, "heterogeneous_peak_flops_per_s"),
                (case.baseline, "baseline_peak_flops_per_s"),
            ):
                peaks = (
                    device.profile.dense_flops_per_s["bfloat16"]
                    for device in cluster.devices
                )
                assert sum(peaks) == case.record[key]


def test_a_folder_without_the_files_is_named(tmp_path: Path):
    with pytest.raises(PublishedDataError, match="Give the folder that holds sailor/"):
        sailor.measured_cases(tmp_path)
    (tmp_path / "models.json").write_text("[]")
    with pytest.raises(PublishedDataError, match="must be one JSON object"):
        sailor.model_chain(tmp_path, MODEL)
    (tmp_path / "models.json").write_text("{")
    with pytest.raises(PublishedDataError, match=r"models\.json is no JSON"):
        read(tmp_path, "sailor", "models")


def test_a_sources_own_folder_serves_too():
    assert read(FOLDER / "sailor", "sailor", "models") == json.loads(
        (FOLDER / "sailor" / "models.json").read_text()
    )
