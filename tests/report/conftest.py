"""Searches here find some plan, not the best: what is told of it is what is tested."""

import pytest

from hexijax.planner.effort import Effort


@pytest.fixture(autouse=True)
def _quick_searches(monkeypatch: pytest.MonkeyPatch):
    few = Effort(scored=40, played=2, refined=2, remade=2)
    monkeypatch.setattr(Effort, "of", classmethod(lambda cls, cluster: few))
