"""The emulated mixes: what is measured is what can be planned for and run small."""

import json
import typing
from pathlib import Path

import pytest

from experiments import emulated_four, emulated_two
from experiments.emulated import plans
from experiments.emulated.cards import MIXES, SETTINGS
from experiments.emulated.table import BEST_EVEN, BEST_PIPELINE, figures
from hexijax.cli.main import main
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.plan.checks import check
from tests.plan.examples import make_chain

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_is_the_same_in_settings_and_in_cluster_files(mix: str):
    cluster = Cluster.from_toml(ROOT / f"experiments/clusters/emulated/{mix}.toml")
    speeds = [float(speed) for speed in mix.split("-")]
    whole = cluster.devices[0].profile.dense_flops_per_s["bfloat16"]
    for name in (mix, f"{mix}-2.7B"):
        setting = SETTINGS[name]
        assert [card.speed for card in setting.cards] == speeds
        assert [card.hold.card for card in setting.cards] == [*range(len(speeds))]
        assert setting.batch_size % len(speeds) == 0
        assert len(setting.even) == len(speeds)
        caps = [card.memory_gib for card in setting.cards]
        nominal = [d.profile.nominal_memory_bytes / 2**30 for d in cluster.devices]
        assert caps == pytest.approx(nominal, rel=0.01)
    for device, speed in zip(cluster.devices, speeds, strict=True):
        peak = device.profile.dense_flops_per_s["bfloat16"]
        assert peak / whole == pytest.approx(speed)


def test_the_experiments_know_every_mix_and_size():
    hints = typing.get_type_hints(emulated_four.experiment)
    assert {"1-0.54", *typing.get_args(hints["mix"])} == MIXES.keys()
    large = emulated_four.experiment(mix="1-1-1-0.28", size="2.7B")
    assert large.batch_size == SETTINGS["1-1-1-0.28-2.7B"].batch_size
    with pytest.raises(UserError, match="Name one of these"):
        emulated_two.experiment(size="7B")


@pytest.mark.usefixtures("backend")
def test_two_cards_train_small(tmp_path: Path):
    file = str(ROOT / "experiments/emulated_two.py")
    small = ("--set", "small=true", "--set", "steps=2", "--no-save")
    assert main(["run", file, "--emulate", "--out", str(tmp_path), *small]) == 0
    (folder,) = tmp_path.iterdir()
    report = json.loads((folder / "report.json").read_text())
    assert report["status"] == "done"
    assert {device["name"] for device in report["devices"]} <= {"box/0", "box/1"}


def test_the_best_even_plans_are_even_and_the_best_pipelines_are_pipelines():
    setting, chain = SETTINGS["small"], make_chain(8)
    cluster = setting.cluster()
    even = plans.best_even(setting, chain, cluster)
    pipeline = plans.best_pipeline(setting, chain, cluster)
    for plan in (even, pipeline):
        check(plan, chain, cluster)
        samples = [
            replica.samples / len(_devices(replica)) for replica in plan.replicas
        ]
        assert max(samples) - min(samples) <= 1
    assert all(len(replica.stages) == 1 for replica in even.replicas)
    assert all(len(replica.stages) > 1 for replica in pipeline.replicas)
    layers = [stage.num_layers for r in pipeline.replicas for stage in r.stages]
    assert max(layers) - min(layers) <= 2, "equal but for embedding and head"


def _devices(replica):
    return [device for stage in replica.stages for device in stage.devices]


def test_figures_hold_ours_against_each_of_them():
    row = {"step_s": 2.0, "predicted_s": 2.0}
    found = {
        "cards": [{"kind": "whole"}, {"kind": "half"}],
        "model": "2.7B",
        "plans": {
            "ours": row | {"tokens_per_s": 30.0},
            BEST_EVEN: row | {"tokens_per_s": 20.0},
            BEST_PIPELINE: row | {"tokens_per_s": 15.0},
        },
        "peers": {"FSDP2": {"tokens_per_s": 10.0}},
    }
    assert {f.name: f.measured for f in figures(found)} == {
        f"1 : 0.54, 2.7 B: ours over the {BEST_EVEN}": 1.5,
        f"1 : 0.54, 2.7 B: ours over the {BEST_PIPELINE}": 2.0,
        "1 : 0.54, 2.7 B: ours over FSDP2's best": 3.0,
    }
