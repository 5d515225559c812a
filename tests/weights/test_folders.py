"""A folder of saved steps, while old ones of them are removed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hexijax.weights.stored.files import Folder


def test_a_step_that_is_removed_while_others_are_listed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files, inside = Folder(tmp_path), Path.iterdir
    for step in (1, 2):
        files.put(f"{step}/n0/manifest.json", b"{}")
    (tmp_path / "notes.txt").write_text("no folder")

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "1":
            files.delete("1")
        return inside(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert files.find("manifest.json") == ["2/n0/manifest.json"]
