"""docs/state.md says what its command does, and ours is first in every row."""

from pathlib import Path

from experiments.state_table import HEAD, OURS

PAGE = (Path(__file__).parents[2] / "docs" / "state.md").read_text(encoding="utf-8")


def test_the_page_is_the_command_s():
    assert PAGE.startswith(HEAD)


def test_no_row_of_another_is_above_ours():
    lines = [line.strip("| ").split(" | ") for line in PAGE.split("\n")]
    heads = [i for i, line in enumerate(lines) if line[:2] == ["sequences", OURS]]
    assert len(heads) == 2
    for head in heads:
        for row in lines[head + 2 : head + 5]:
            ours, *others = (int(x.replace(",", "")) for x in row[1:])
            assert ours >= max(others), row
