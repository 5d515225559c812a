"""Documents: made into tokens once, packed so that no pair is lost, none seen twice."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.data import Packed, Text, TextBytes, Tokenizer, open_data
from hexijax.data.packing import pack
from hexijax.data.windows import HELD_OUT_EVERY
from hexijax.errors import UserError

TEXTS = ["one two three", "two", "", "three two one two three two one", "one one"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A tokenizer of five words, in a file."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[?]": 0, "one": 1, "two": 2, "three": 3, "<end>": 4}
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="[?]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.fixture
def lines(tmp_path: Path) -> str:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": t}) for t in TEXTS) + "\n")
    return str(file)


def save_dataset(folder: Path, columns: dict[str, Any], files: int = 2) -> None:
    """As ``datasets.Dataset.save_to_disk`` does."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table = pa.table(columns)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    rows = -(-len(table) // files)
    for i, name in enumerate(names):
        part = table.slice(i * rows, rows)
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(part, max_chunksize=2)
    state = {"_data_files": [{"filename": n} for n in names], "_fingerprint": "f"}
    (folder / "state.json").write_text(json.dumps(state))


def documents(data: Packed, windows: int) -> list[list[int]]:
    """What a pass over the windows reads, piece by piece, each with its last target."""
    found = []
    for batch in itertools.islice(data.batches(1), windows):
        for segment in range(1, batch["segments"].max() + 1):
            here = batch["segments"][0] == segment
            inputs, targets = batch["inputs"][0][here], batch["targets"][0][here]
            np.testing.assert_array_equal(inputs[1:], targets[:-1])
            np.testing.assert_array_equal(
                batch["positions"][0][here], range(here.sum())
            )
            found.append([*inputs.tolist(), int(targets[-1])])
        np.testing.assert_array_equal(batch["weights"] > 0, batch["segments"] > 0)
    return sorted(found)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    length=st.integers(1, 12),
)
def test_every_pair_of_tokens_is_in_exactly_one_window(lengths, length):
    packing = pack(np.asarray(lengths, np.int64), length)
    pairs = []
    for window in range(len(packing)):
        pieces = range(packing.first_W[window], packing.first_W[window + 1])
        assert 0 < sum(packing.count_P[p] for p in pieces) <= length
        for p in pieces:
            start = packing.start_P[p]
            pairs += [
                (packing.document_P[p], start + i) for i in range(packing.count_P[p])
            ]
    want = [(d, i) for d, n in enumerate(lengths) for i in range(n - 1)]
    assert sorted(pairs) == want
    # Best fit: at most one window is half empty, or two would have been one.
    filled = [
        packing.count_P[a:b].sum() for a, b in itertools.pairwise(packing.first_W)
    ]
    assert sum(2 * n <= length for n in filled) <= 1


def test_words_are_packed_and_read_back(words: str, lines: str):
    data = Packed(lines, 8, words, end="<end>")
    assert data.vocabulary == 5
    windows = len(data._packing)
    assert data.filled == (3 + 1 + 0 + 7 + 2) / (8 * windows)
    ids = {"one": 1, "two": 2, "three": 3}
    want = [[*(ids[w] for w in text.split()), 4] for text in TEXTS if text]
    assert documents(data, windows) == sorted(want)
    batch = next(data.batches(3))
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        **dict.fromkeys(("inputs", "targets", "segments"), ((3, 8), "int32")),
        "positions": ((3, 8), "int32"),
        "weights": ((3, 8), "float32"),
    }


def test_tokens_are_made_once(words: str, lines: str, monkeypatch: pytest.MonkeyPatch):
    first = next(Packed(lines, 8, words).batches(2))
    monkeypatch.setattr(Tokenizer, "encode", None)
    again = next(Packed(lines, 8, words).batches(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    with pytest.raises(TypeError):  # another tail, other tokens
        next(Packed(lines, 8, words, end="<end>").batches(2))


def test_windows_of_a_tokenizers_tokens(words: str, tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_text("one two three " * 30)
    data = open_data(str(file), 6, vocab_size=5, tokenizer=words)
    assert isinstance(data, Text)
    batch = next(data.batches(4))
    assert set(batch) == {"inputs", "targets"}
    assert np.isin(batch["inputs"], [1, 2, 3]).all()
    np.testing.assert_array_equal(batch["inputs"] % 3 + 1, batch["targets"])


def test_bytes_need_no_tokenizer(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("cde")
    data = Packed(str(tmp_path), 4)
    assert data.vocabulary == 256
    assert documents(data, len(data._packing)) == [[*b"ab"], [*b"cde"]]


@pytest.mark.parametrize("split", [None, "test"])
def test_a_saved_dataset_of_text_and_of_tokens(
    words: str, tmp_path: Path, split: str | None
):
    tokens = [[1, 2], [3], [], [2, 3, 1, 1, 2, 3, 2, 1, 2], [3, 3, 3]]
    folder = tmp_path / "saved"
    save_dataset(folder / (split or "train"), {"text": TEXTS, "ids": tokens})
    splits = {"splits": [split or "train", "other"]}
    (folder / "dataset_dict.json").write_text(json.dumps(splits))
    data = Packed(str(folder), 4, words, split=split)
    assert documents(data, len(data._packing)) == [
        [1, 1], [1, 2, 3], [3, 2, 1], [3, 2, 1, 2, 3],
    ]  # fmt: skip
    taken = Packed(str(folder), 4, column="ids", split=split)
    assert taken.vocabulary is None
    # The nine tokens have eight pairs: two windows, which share a token.
    assert documents(taken, len(taken._packing)) == [
        [1, 2], [2, 3, 1, 1, 2], [2, 3, 2, 1, 2], [3, 3, 3],
    ]  # fmt: skip
    assert taken.fingerprint() != data.fingerprint()


def test_whole_documents_are_held_out(tmp_path: Path):
    pieces = {f"{i:02d}.txt": f"{i:02d}" * 3 for i in range(2 * HELD_OUT_EVERY)}
    for name, text in pieces.items():
        (tmp_path / name).write_text(text)
    train, held_out = (
        Packed(str(tmp_path), 5, held_out=held_out) for held_out in (False, True)
    )
    read = [documents(data, len(data._packing)) for data in (train, held_out)]
    assert read[1] == [[*b"191919"], [*b"393939"]]
    assert len(read[0]) == 38
    assert train.fingerprint() != held_out.fingerprint()


def test_packed_batches_continue_from_a_position_stored_as_json():
    data = Packed(None, 64, seed=3)
    unbroken = data.batches(4)
    for _ in range(3):
        next(unbroken)
    resumed = data.batches(4)
    resumed.set_state(json.loads(json.dumps(unbroken.get_state())))
    for _ in range(3):
        a, b = next(unbroken), next(resumed)
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert data.filled > 0.95


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda d, w: Packed(f"{d}/t.jsonl", 8, w, vocab_size=4),
            "t.jsonl has 5 tokens, and the model knows vocab_size=4. Give the model at",
        ),
        (
            lambda d, w: Text(f"{d}/t.jsonl", 8, w, vocab_size=3),
            "has 5 tokens, and the model knows vocab_size=3",
        ),
        (lambda d, w: Packed(f"{d}/t.jsonl", 8, w, end="<s>"), "has no token '<s>'"),
        (lambda d, w: Packed(f"{d}/t.jsonl", 8, end="ab"), "has no token 'ab'"),
        (lambda d, w: Packed(f"{d}/t.jsonl", 8, f"{d}/no.json"), "is no tokenizer fil"),
        (lambda d, w: Packed(f"{d}/t.jsonl", 8, f"{d}/t.jsonl"), "cannot be read"),
        (
            lambda d, w: Packed(f"{d}/t.jsonl", 8, column="txt"),
            "t.jsonl, line 1: no text under 'txt' (KeyError: 'txt'). Did you mean 'tex",
        ),
        (lambda d, w: Packed(f"{d}/bad.txt", 8), "is no UTF-8 text (byte 0)"),
        (lambda d, w: Packed(f"{d}/one.txt", 8), "has 1 documents, none of two tokens"),
        (lambda d, w: Packed(f"{d}/t.jsonl", 0), "A length of 0 was asked of"),
        (lambda d, w: Packed(f"{d}/s", 8), "the columns ids, x, and 'text' was asked"),
        (lambda d, w: Packed(f"{d}/s", 8, column="x"), "'x' of .* holds double"),
        (
            lambda d, w: Packed(f"{d}/s", 8, column="ids", vocab_size=2),
            "has token 7 in document 0, but the vocabulary has 2 tokens",
        ),
        (
            lambda d, w: Packed(f"{d}/p", 8, column="ids", split="tset"),
            "the splits train, test, and 'tset' was asked. Did you mean 'test'?",
        ),
        (
            lambda d, w: Packed(f"{d}/broken", 8),
            "is no dataset that was saved with sav",
        ),
    ],
)
def test_errors_say_what_is_wrong_with_the_documents(
    tmp_path: Path, words: str, make, says: str
):
    (tmp_path / "t.jsonl").write_text('{"text": "one two"}\n')
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "one.txt").write_text("a")
    save_dataset(tmp_path / "s", {"ids": [[1, 7], [1]], "x": [0.5, 1.5]})
    (tmp_path / "p").mkdir()
    (tmp_path / "p/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/state.json").write_text("{")
    with pytest.raises(UserError, match=says.replace("(", r"\(").replace(")", r"\)")):
        next(make(tmp_path, words).batches(1))


@pytest.mark.parametrize(
    ("package", "make", "extra"),
    [
        ("tokenizers", lambda d: Packed(None, 8, "gpt2"), r"hexijax\[tokenizers\]"),
        ("pyarrow", lambda d: Packed(str(d / "s"), 8), r"hexijax\[datasets\]"),
    ],
)
def test_a_missing_extra_is_named(
    package: str, make, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_dataset(tmp_path / "s", {"text": ["a"]}, files=1)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"is not installed: pip install '{extra}'"):
        make(tmp_path).batches(1)


def test_text_bytes_are_the_default():
    a, b = next(TextBytes(length=32).batches(2)), next(open_data(None, 32).batches(2))
    assert all(np.array_equal(a[name], b[name]) for name in a)
