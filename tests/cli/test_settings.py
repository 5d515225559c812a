"""Experiments are read without running them, set from text, and fail by their line."""

from pathlib import Path

import pytest

from hexijax.cli.fields import read_source
from hexijax.cli.loading import find_experiment, load_experiment, project_root
from hexijax.cli.settings import parse_settings
from hexijax.errors import UserError

NOTE = '''"""A note."""
from typing import Literal
import hexijax.experiment

def experiment(
    *,
    width: int = 64,
    rate: float = 3e-4,
    data: str | None = None,
    tied: bool = False,
    kind: Literal["gpt", "llama"] = "gpt",
    steps=7,
    blob: dict = {},
):
    """Makes it.

    Args:
        width: features of the
            residual stream.
        data: text files.

    Returns:
        an experiment.
    """
    assert width != 13, "unlucky"
    return hexijax.experiment.Experiment(
        loss=(width, rate, data, tied, kind), steps=steps, cluster="clusters/two.toml"
    )
'''


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "experiments" / "note.py"
    path.parent.mkdir()
    path.write_text(NOTE)
    return path


def test_a_file_is_read_without_running_it(note: Path):
    source = read_source(note)
    assert source.note == "A note."
    assert source.cluster == "clusters/two.toml"
    width, *_ = source.parameters
    assert (width.name, width.type, width.default) == ("width", "int", "64")
    assert width.doc == "features of the residual stream."
    assert source.fields["data"].doc == "text files."
    assert source.fields["batch_size"].doc.startswith("Sequences (samples) of one")
    assert source.fields["steps"].default == "7"  # its own before the Experiment's
    assert "loss" not in source.fields


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("width=1_000", {"width": 1000}),
        ("width=1e3", {"width": 1000}),
        ("rate=1e-3", {"rate": 1e-3}),
        ("data=a=b", {"data": "a=b"}),
        ("data=none", {"data": None}),
        ("tied=YES", {"tied": True}),
        ("kind=llama", {"kind": "llama"}),
        ("clip_norm=none", {"clip_norm": None}),
        ("clip_norm=1", {"clip_norm": 1.0}),
    ],
)
def test_values_get_their_fields_type(note: Path, text: str, value: dict):
    assert parse_settings([text], read_source(note)) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "widht=1",
            "has no field 'widht'. Did you mean 'width'? Its fields are width,",
        ),
        ("width", "an assignment is needed"),
        ("width=1.5", "width takes a whole number, not '1.5'. Its default is 64."),
        ("tied=maybe", "tied takes true or false, not 'maybe'"),
        ("kind=lama", "takes 'gpt' or 'llama', not 'lama'. Did you mean 'llama'?"),
        ("loss=x", "loss is a Python object"),
        ("blob=x", "blob has type 'dict', which text cannot give"),
    ],
)
def test_bad_settings_are_told(note: Path, text: str, says: str):
    with pytest.raises(UserError) as error:
        parse_settings([text], read_source(note))
    assert says in str(error.value)


def test_parameters_are_passed_and_fields_replaced(note: Path):
    source = read_source(note)
    values = parse_settings(["width=2", "steps=3", "batch_size=5"], source)
    experiment = load_experiment(source, values)
    assert experiment.loss == (2, 3e-4, None, False, "gpt")
    assert (experiment.steps, experiment.batch_size) == (3, 5)
    assert experiment.name == "note"


def test_an_experiment_is_found_by_path_and_by_module(
    note: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(note.parent.parent)
    assert find_experiment("experiments/note.py") == note
    assert find_experiment("experiments.note") == note
    assert project_root(note) == note.parent.parent
    with pytest.raises(UserError, match=r"Did you mean 'experiments/note\.py'\?"):
        find_experiment("experiments/nota.py")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["width=13"], ', in experiment:\n    assert width != 13, "unlucky"'),
        (["steps=0"], "Experiment.steps is 0; it must be at least 1."),
        (["clip_norm=-1"], "Experiment.clip_norm is -1.0; it must be positive"),
    ],
)
def test_a_fault_of_the_experiment_is_told_by_its_line(
    note: Path, settings: list[str], says: str
):
    source = read_source(note)
    with pytest.raises(UserError) as error:
        load_experiment(source, parse_settings(settings, source))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (", ", line 1: '(' was never closed.\n    x = ("),
        ("x = 1", "defines no function experiment()"),
        ("def experiment(width): ...", "width of experiment() (line 1) has no default"),
    ],
)
def test_a_file_that_is_no_experiment_is_told(tmp_path: Path, text: str, says: str):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_source(path)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_of_that_name\ndef experiment(): ...", ", line 1, in <module>"),
        ("def experiment(): return 3", "returned a int; it must return a hexijax"),
    ],
)
def test_a_file_that_fails_is_told_by_its_line(tmp_path: Path, text: str, says: str):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_experiment(read_source(path), {})
    assert says in str(error.value)
