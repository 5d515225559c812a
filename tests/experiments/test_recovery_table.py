"""The table of recoveries: what it reads is right, and the page keeps its promise."""

import pytest

from experiments import recovery_table

pytestmark = pytest.mark.usefixtures("backend")


def test_a_cell_is_read_from_where_it_says(monkeypatch: pytest.MonkeyPatch):
    """Small, and at rates that nothing here limits; every recovery is compared."""
    monkeypatch.setattr(recovery_table, "LOST", (2,))
    monkeypatch.setattr(recovery_table, "HELD", (0.0, 0.5))
    state = recovery_table.State(arrays=1)
    found = list(recovery_table.cells(state, far=(1e9,), repeats=1, patience_s=0))
    none, half = (cell.moved for cell in found)
    assert none == {"far": state.num_bytes}
    assert half["far"] >= state.num_bytes / 2
    assert sum(half.values()) == state.num_bytes
    page = recovery_table.render(found, state.num_bytes)
    assert "| 50% | " in page
