"""Pictures are the same bytes wherever they are drawn, and there whatever happens."""

import sys

import pytest

from hexijax.cli.drawing import Drawing
from hexijax.report.pictures import draw
from tests.report.problems import make_judged


@pytest.mark.parametrize("dies", [False, True])
def test_pictures_of_a_process_are_those_drawn_here(
    monkeypatch: pytest.MonkeyPatch, dies: bool
):
    judged = make_judged()
    here = draw(judged)
    monkeypatch.delitem(sys.modules, "hexijax.report.pictures")
    with Drawing() as drawing:
        assert drawing._process is not None
        if dies:
            drawing._process.kill()
            drawing._process.wait()
        drawing.begin(judged)
        assert drawing.pictures() == here
    assert drawing._process.returncode is not None
