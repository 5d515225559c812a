"""Where a run saves, as a person says it, and where its steps are found again."""

import json
import math
from pathlib import Path

import pytest

from hexijax.errors import UserError
from hexijax.job.saving import Choices, stored, write_tiers
from hexijax.report import RunFolder
from hexijax.weights.runs import Run
from hexijax.weights.slices import Key
from tests.checkpoint.writing import PARAMS, numbers, save


def test_a_run_saves_in_its_folder_unless_told(tmp_path: Path):
    folder = RunFolder(tmp_path / "gpt-001")
    own = Choices(save_every=5).tiers(folder)
    assert own.fast.where == str(tmp_path / "gpt-001" / "checkpoints")
    assert (own.far, own.keep, own.far_rate.bytes_per_s) == (None, 2, math.inf)
    assert [step for step in range(1, 21) if own.due(step)] == [5, 10, 15, 20]
    write_tiers(folder, own)
    assert not (folder.path / "tiers.json").exists()
    with pytest.raises(UserError, match="there is no such folder. Mount it or make it"):
        Choices(far=str(tmp_path / "away")).tiers(folder)


def test_steps_are_found_wherever_the_run_saved_them(tmp_path: Path):
    folder = RunFolder(tmp_path / "gpt-001")
    folder.path.mkdir()
    (tmp_path / "far").mkdir()
    choices = Choices(
        fast=str(tmp_path / "fast"),
        far=str(tmp_path / "far"),
        save_every=2,
        far_every=3,
        far_rate=0.5,
    )
    tiers = choices.tiers(folder)
    assert tiers.far is not None
    assert tiers.far_rate.bytes_per_s == 0.5e9
    assert [step for step in range(1, 7) if tiers.due(step)] == [2, 3, 4, 6]
    assert [step for step in range(1, 7) if tiers.sends(step)] == [3, 6]
    write_tiers(folder, tiers)
    labels = [
        x["label"]
        for x in json.loads((folder.path / "tiers.json").read_text())["tiers"]
    ]
    assert labels == ["disk", "far"]
    save(tiers.fast, 4)
    save(tiers.far, 3)
    found = stored(folder, lambda text: None)
    assert found.whole() == [4, 3]
    assert [source.label for source in found.sources(3)] == ["far", "far"]
    run = Run(folder.path)
    assert (run.found_step, list(run.tensors)) == (4, [PARAMS[0].name])
    box = ((100, 200), (3, 9))
    want = numbers(Key("w", "master"), 4)[100:200, 3:9]
    assert (run.read("w", box) == want).all()
    assert Run(folder.path, 3).found_step == 3
