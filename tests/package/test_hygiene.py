"""The repository stands for itself: nothing in it points at one machine."""

import collections
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Spelled so that this file does not hold what it forbids.
FORBIDDEN = {
    "a path of somebody's machine": r"(?<![\w.])/(?:home|root|Users|work)/\w",
    "a package index": r"https?://\S*/sim" + r"ple\b|(?:extra-)?index" + r"-url",
}


@pytest.fixture(scope="module")
def tracked_texts() -> dict[str, str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return {
        str(path.relative_to(ROOT)): path.read_text(errors="replace")
        for path in paths
        if path.is_file()
    }


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_names(what: str, tracked_texts: dict[str, str]):
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(FORBIDDEN[what], line)
    ]
    assert not found


def test_constraints_are_versions_only():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert not line or re.fullmatch(
            r"#.*|[\w.-]+==[\w.]+( ; python_version (<|>=) \"3\.12\")?", line
        )


def test_no_two_test_files_share_a_name():
    """pytest takes one of them for the other."""
    names = collections.Counter(p.name for p in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
