"""Column, then row: which dim of a weight is split over the model axis."""

import pytest
from test_cut_law import traced

GPT = {
    "embed/embedding": 0,
    "positions": None,
    "norm/scale": None,
    "attention_norm/scale": None,
    "attention/query/kernel": 1,
    "attention/query/bias": 0,
    "attention/value/kernel": 1,
    "attention/out/kernel": 0,
    "attention/out/bias": None,
    "ff/up/kernel": 1,
    "ff/up/bias": 0,
    "ff/down/kernel": 0,
    "ff/down/bias": None,
}
LLAMA = {
    "embed/embedding": 0,
    "head/kernel": 1,
    "attention/query/kernel": 1,
    "ff/gate/kernel": 1,
    "ff/up/kernel": 1,
    "ff/down/kernel": 0,
}


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("gpt", GPT),
        ("gpt-bf16", GPT),
        ("gpt-dropout", GPT),
        ("linen", GPT),
        ("gpt-scanned", GPT),
        pytest.param("linen-scanned", GPT, marks=pytest.mark.laws),
        ("llama", LLAMA),
    ],
)
def test_splits_follow_the_products(name: str, want: dict[str, int | None]):
    found = {}
    for leaf in traced(name).chain.leaves():
        path = leaf.name.split("/")
        short = "/".join(p for p in path if not p.startswith("blocks") and p != "0")
        dim = leaf.tensor_dim
        if leaf.row is not None and dim is not None:
            dim -= 1  # the row keeps its leading 1
        found.setdefault(short.removeprefix("1/"), dim)
    assert {k: found[k] for k in want} == want
