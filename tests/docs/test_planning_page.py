"""What README and docs/planning.md tell people to type is understood."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hexijax.cli.main import _parser
from hexijax.cli.prices import TABLE, read_prices
from hexijax.report.problem import Problem
from tests.report.problems import make_judged, make_problem

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/planning.md")
COMMANDS = [
    (page, line.strip())
    for page in PAGES
    for line in re.findall(
        r"^    (?:\S*&& )?hexijax (.+?)(?: +#.*)?$",
        (ROOT / page).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
]


def test_both_pages_have_commands():
    assert {page for page, _ in COMMANDS} == {*PAGES}


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_parses(page: str, line: str):
    del page
    arguments = _parser().parse_args(shlex.split(line))
    named = str(getattr(arguments, "experiment", ""))
    if named.startswith("experiments/"):
        assert (ROOT / named).is_file()


def test_the_fields_that_programs_read_are_there():
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    text = page[page.index("## For programs") :]
    judged = make_judged(make_problem([[("fast", 1)]]))
    figures = json.dumps(judged.figures())
    for name in re.findall(r"`(\w+_?\w*)`", text):
        if name not in ("plan", "limits", "runners_up"):
            assert f'"{name}": ' in figures, name


def test_the_price_file_shown_is_one(tmp_path: Path):
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert f"[{TABLE}]" in text
    file = tmp_path / "prices.toml"
    file.write_text(text)
    problem: Problem = make_problem([[("fast", 1)]])
    assert read_prices(file, problem.cluster)["h100-80g-sxm"] == 2.5


def test_its_picture_is_small():
    assert (ROOT / "docs/planning_timeline.png").stat().st_size < 200_000
