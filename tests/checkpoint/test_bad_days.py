"""Killed, full, torn, flipped, away: what was committed stands, and is said."""

import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexijax.checkpoint import Inventory, Tiers, inventory
from hexijax.checkpoint.writer import clear_leftovers
from hexijax.weights.errors import Damaged, WeightsError
from hexijax.weights.slices import Key
from hexijax.weights.stored.files import Folder, Rate, open_files
from hexijax.weights.stored.parts import parts_in, whole_steps
from tests.checkpoint.writing import check, halves, save

ROOT = Path(__file__).parents[2]
W = Key("w", "master")


def killed(folder: Path, after_s: float) -> int:
    """Runs a writer, kills it; returns the last step it said was committed."""
    command = [sys.executable, "-m", "tests.checkpoint.writing", folder, folder / "far"]
    with subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()  # it has begun
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        said = [line for line in [first, *process.stdout] if line.endswith("\n")]
    return int(said[-1])


@pytest.mark.parametrize(
    "count", [5, pytest.param(500, marks=pytest.mark.laws)], ids=["few", "many"]
)
def test_killed_at_any_moment_of_a_save_nothing_committed_is_lost(
    count: int, tmp_path: Path, record_property: Any
):
    rng, before = random.Random(count), 0
    half_written = 0
    for _ in range(count):
        committed = killed(tmp_path, rng.uniform(0, 0.25))
        assert committed > before  # it went on from there
        stored = inventory(Tiers(fast=Folder(tmp_path), far=Folder(tmp_path / "far")))
        newest = stored.whole()[0]
        assert newest >= committed
        check(stored, newest)
        half_written += len(list(tmp_path.glob("[0-9]*/*"))) - len(
            parts_in(Folder(tmp_path), "disk")
        )
        before = newest
    record_property("kills, of which in a save", (count, half_written))
    clear_leftovers(Folder(tmp_path), ["n0", "n1"])
    parts = parts_in(Folder(tmp_path), "disk")
    assert len(list(tmp_path.glob("[0-9]*/*"))) == len(parts)


def test_a_step_is_whole_when_all_nodes_have_written_it(tmp_path: Path):
    files = Folder(tmp_path)
    save(files, 1)
    save(files, 2, "n0")
    found = inventory(Tiers(fast=files))
    assert found.whole() == [1]
    assert str(found.gap(2)) == "w master [120:300,0:400]"
    assert found.without(["n0"]).whole() == []
    assert list(whole_steps(found.parts)) == [1]


def test_who_wakes_after_the_others_went_on_makes_no_step_with_them(tmp_path: Path):
    files = Folder(tmp_path)
    save(files, 1, session="before")
    save(files, 2, "n0", session="before")  # n1 is cut off: the others do 2 anew
    save(files, 2, session="after")
    assert inventory(Tiers(fast=files)).whole() == [2, 1]
    save(files, 2, "n1", session="before")
    assert inventory(Tiers(fast=files)).whole() == [1]
    assert list(whole_steps(parts_in(files, "disk"))) == [1]
    save(files, 3, "n1", session="before")
    save(files, 3, "n0", session="after")
    assert inventory(Tiers(fast=files)).whole() == [1]
    save(files, 3, "n1", session="after")
    assert inventory(Tiers(fast=files)).whole() == [3, 1]


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """No file of this process can be longer, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_leaves_the_steps_before(tmp_path: Path):
    files = Folder(tmp_path)
    save(files, 1)
    with files_end_at(100_000), pytest.raises(OSError, match="cannot be written"):
        save(files, 2)
    found = inventory(Tiers(fast=files))
    assert found.whole() == [1]
    check(found, 1)
    save(files, 2)  # there is room again
    check(inventory(Tiers(fast=files)), 2)


def chunk(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"{step}/n1/state/*-w-master/c.0.0")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def another(path: Path) -> None:
    """A chunk that passes its own check."""
    path.write_bytes(chunk(path.parents[4], 1).read_bytes())


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (flip, "cannot be read .*Digest mismatch"),
        (truncate, "is not what was written: its crc32c is"),
        (another, "is not what was written: its crc32c is"),
        (Path.unlink, "No such file"),
    ],
)
def test_a_harmed_chunk_is_seen(harm: Any, says: str, tmp_path: Path):
    files = Folder(tmp_path)
    save(files, 1)
    save(files, 2)
    harm(chunk(tmp_path, 2))
    (part,) = (p for p in parts_in(files, "disk") if p.prefix == "2/n1/")
    (box,) = part.holds[W]
    with pytest.raises(Damaged, match=says):
        part.read(*W, box)
    check(inventory(Tiers(fast=files)), 1)


def test_a_harmed_manifest_is_no_step(tmp_path: Path):
    files, told = Folder(tmp_path), list[str]()
    save(files, 1)
    save(files, 2)
    manifest = tmp_path / "2" / "n0" / "manifest.json"
    flip(manifest)
    assert inventory(Tiers(fast=files), tell=told.append).whole() == [1]
    assert "2/n0/manifest.json is not what was written: its checksum differs" in told[0]
    manifest.write_text("{")
    assert inventory(Tiers(fast=files), tell=told.append).whole() == [1]
    assert "is no manifest of a saved step" in told[1]
    manifest.write_text('{"version": 3, "crc32": 0}\n{}')
    assert inventory(Tiers(fast=files), tell=told.append).whole() == [1]
    assert "has format version 3; this hexijax reads version 2" in told[2]
    assert issubclass(Damaged, WeightsError)


def test_places_that_fsspec_opens_hold_steps_too(tmp_path: Path):
    files = open_files(f"memory://{tmp_path}")
    assert parts_in(files, "far", "") == []
    save(files, 1)
    save(files, 2)
    stored = Inventory(parts=parts_in(files, "far", ""))
    assert stored.whole() == [2, 1]
    check(stored, 2)
    with pytest.raises(Exception, match="neither TensorStore nor fsspec knows what"):
        open_files("nowhere://x")


def test_a_rate_is_kept_by_all_threads_together():
    rate, began = Rate(1e6), time.monotonic()
    threads = [threading.Thread(target=rate.take, args=(25_000,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.2


def test_a_rate_that_is_lifted_holds_nobody_any_more():
    rate = Rate(1.0)
    waiting = threading.Thread(target=rate.take, args=(1000,), daemon=True)
    waiting.start()
    rate.bytes_per_s = float("inf")
    waiting.join(60)
    assert not waiting.is_alive()


def test_nothing_of_jax_is_needed_to_write_and_read(tmp_path: Path):
    code = (
        "import sys; from tests.checkpoint.writing import *; "
        f"files = Folder(Path({str(tmp_path)!r})); save(files, 1); "
        "assert list(whole_steps(parts_in(files, 'disk'))) == [1]; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_same_numbers_are_in_both_nodes_halves():
    rows = [x for held in halves(3).values() for k, x in held.items() if k.key == W]
    assert np.concatenate(rows).shape == (300, 400)
