"""The promise of every program of a segment, beside XLA's own figures.

Bytes given and returned are exact; what is alive within is an upper bound, whose
factor depends on the JAX version (`costs.temp`).
"""

import pytest

from experiments.memory_table import MODELS, Row, Sizes, rows
from hexijax.layers.chain import Remat


def check(row: Row) -> None:
    held, promised = row.compiled.held_bytes, row.promised.held_bytes
    assert promised == pytest.approx(held, rel=0.02), row
    assert row.compiled.aliases_bytes == pytest.approx(
        row.promised.aliases_bytes, rel=0.02
    )
    assert row.compiled.temp_bytes <= row.promised.temp_bytes, row


def test_a_llama_in_two_stages_is_what_was_promised():
    found = list(rows("llama", Sizes(length=64), Remat.DOTS))
    assert [row.way for row in found] == ["forward", "backward", "fused"]
    for row in found:
        check(row)


@pytest.mark.laws
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_what_was_promised(model: str, remat: Remat, dtype: str):
    for row in rows(model, Sizes(dtype=dtype), remat):
        check(row)
