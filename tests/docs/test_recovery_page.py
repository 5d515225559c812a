"""docs/recovery.md has every cell, and says of them what is so."""

import re
from pathlib import Path

import pytest

from experiments.recovery_table import FAR_BYTES_PER_S, HELD, LOST, WORTH

PAGE = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text(encoding="utf-8")
CELL = re.compile(r"([0-9.]+) / ([0-9.]+) \([0-9.]+ s\)")


def test_the_page_says_of_its_cells_what_is_so():
    found = [(float(ours), float(allowed)) for ours, allowed in CELL.findall(PAGE)]
    assert len(found) == len(LOST) * len(HELD) * len(FAR_BYTES_PER_S)
    (least,) = re.findall(r"least share of what is possible is ([0-9.]+);", PAGE)
    shares = [ours / allowed for ours, allowed in found]
    assert float(least) == pytest.approx(min(shares), abs=0.01)
    # Wherever that much sooner is possible, it is that much sooner.
    assert all(ours >= WORTH for ours, allowed in found if allowed >= WORTH)
    assert max(ours for ours, _ in found) >= WORTH
