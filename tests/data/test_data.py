"""Batches are exact, endless, repeatable, and continue from a stored position."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from hexijax.data import TextBytes, TokenFile, open_data
from hexijax.data.windows import HELD_OUT_EVERY, Windows
from hexijax.errors import UserError


def test_the_default_text_is_the_standard_library():
    data = TextBytes(length=64)
    batch = next(data.batches(5))
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "inputs": ((5, 64), "int32"),
        "targets": ((5, 64), "int32"),
    }
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert data.fingerprint() == TextBytes(length=64).fingerprint()
    assert data.fingerprint() != TextBytes(length=32).fingerprint()


def test_a_split_has_every_window_once_and_the_held_out_ones_never():
    tokens = np.arange(1001, dtype=np.int32)
    train = Windows(tokens=tokens, length=10, source="test")
    held_out = Windows(tokens=tokens, length=10, source="test", held_out=True)
    firsts = [
        split.take(np.arange(len(split)))["inputs"][:, 0] for split in (train, held_out)
    ]
    assert sorted(np.concatenate(firsts)) == list(range(0, 1000, 10))
    assert list(firsts[1]) == list(range(190, 1000, 10 * HELD_OUT_EVERY))


def test_one_pass_is_a_permutation_and_the_next_pass_another():
    windows = Windows(tokens=np.arange(161), length=10, source="test")  # 16 windows
    batches = itertools.islice(windows.batches(8, seed=1), 4)
    first, second = np.split(
        np.concatenate([batch["inputs"][:, 0] for batch in batches]), 2
    )
    assert sorted(first) == sorted(second) == list(range(0, 160, 10))
    assert list(first) != list(second)


def test_a_batch_larger_than_the_data_is_still_exact():
    windows = Windows(tokens=np.arange(31), length=10, source="test")
    assert next(windows.batches(8, seed=0))["inputs"].shape == (8, 10)


def test_iteration_continues_from_a_position_stored_as_json():
    data = TextBytes(length=32, seed=3)
    unbroken = data.batches(4)
    for _ in range(3):
        next(unbroken)
    state = json.loads(json.dumps(unbroken.get_state()))
    resumed = data.batches(4)
    resumed.set_state(state)
    for _ in range(3):
        np.testing.assert_array_equal(next(unbroken)["inputs"], next(resumed)["inputs"])


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_token_files_are_read_as_written(tmp_path: Path, name: str):
    tokens = np.arange(1, 1000, dtype=np.uint16)
    path = tmp_path / name
    np.save(path, tokens) if name.endswith("npy") else tokens.tofile(path)
    data = open_data(str(path), 8, vocab_size=1000)
    assert isinstance(data, TokenFile)
    batch = next(data.batches(2))
    np.testing.assert_array_equal(batch["inputs"] + 1, batch["targets"])
    assert len(data.fingerprint()) == 12


def test_a_folder_is_its_text_files_in_sorted_order(tmp_path: Path):
    (tmp_path / "b.txt").write_text("bb")
    (tmp_path / "a.md").write_text("aa")
    (tmp_path / ".hidden").write_text("cc")
    (tmp_path / "image.png").write_bytes(b"\x89\0\0")
    batch = next(TextBytes(str(tmp_path), 4).batches(1))
    assert bytes(batch["inputs"][0].tolist()) == b"aa\nb"
    batch = next(TextBytes(str(tmp_path / "*.txt"), 1).batches(1))
    assert bytes(batch["targets"][0].tolist()) == b"b"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda d: TextBytes(str(d / "none.txt")), "there is no such file"),
        (lambda d: TextBytes(str(d / "empty")), "there is no text files in it"),
        (lambda d: TextBytes(str(d / "short.txt"), 64), "has 5 tokens, too few: 65"),
        (lambda d: TokenFile(str(d / "none.bin")), "does not exist"),
        (lambda d: TokenFile(str(d / "short.txt"), 2), "no whole number of uint16"),
        (lambda d: TokenFile(str(d / "short.txt"), 2, "uint6"), "mean 'uint16'?"),
        (lambda d: TokenFile(str(d / "square.npy"), 2), "shape (2, 2)"),
        (lambda d: TokenFile(str(d / "bad.npy"), 2), "is no .npy file"),
        (
            lambda d: TokenFile(str(d / "short.txt"), 2, "uint8", vocab_size=9),
            "has token 104 at position 0, but the vocabulary has 9",
        ),
        (
            lambda d: TextBytes(str(d / "short.txt"), 2, held_out=True),
            "41 are needed for one window of length 2 (one in 20",
        ),
    ],
)
def test_errors_say_what_is_wrong_with_the_data(tmp_path: Path, make, says: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("hello")
    np.save(tmp_path / "square.npy", np.ones((2, 2), np.int32))
    (tmp_path / "bad.npy").write_text("x")
    with pytest.raises(UserError) as error:
        next(make(tmp_path).batches(1))
    assert says in str(error.value)
