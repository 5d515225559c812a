"""What a pipe is told of a run."""

import io

import pytest
from rich.console import Console

from hexijax.job import screen


def test_the_first_step_says_nothing_of_how_long_the_others_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It loads programs; of a resumed run it is not step 1."""
    monkeypatch.setattr(screen, "PLAIN_EVERY_S", 0.0)
    for start in (0, 4):
        told = screen.Screen(Console(file=io.StringIO()))
        told.training(8, start)
        for step, step_s in enumerate((60.0, 0.5, 0.5), start):
            line = {"step": step, "step_s": step_s, "loss": 1.0, "tokens_per_s": 2.0}
            told.step(line, 8)
        first, second, third = capsys.readouterr().out.splitlines()[1:]
        assert first == f"step {start + 1}/8  loss 1.0000  2 tokens/s"
        assert second.endswith("  0:03 left" if start == 0 else "  0:01 left")
        assert third.endswith("left")
