"""Shares of peaks say where they come from, and stand beside what was measured."""

from pathlib import Path

import pytest

from hexijax.cli.main import main
from hexijax.costs.revising import shares
from hexijax.errors import UserError

ROOT = Path(__file__).parents[2]

PROFILE = """\
format = 1

[measured]
mine = { product_dtype = "float32", product_tflops = 3, memory_gb_per_s = 80 }

[measured.h100-80g-sxm]
product_dtype = "bfloat16"
product_tflops = 800
memory_gb_per_s = 3000

[kinds.h100-80g-sxm]
source = "measured"
"""


def test_a_profile_stands_beside_what_is_taken(tmp_path: Path):
    (tmp_path / "p.toml").write_text(PROFILE)
    products, memory = shares(tmp_path / "p.toml")
    assert str(products) == (
        "h100-80g-sxm, products in bfloat16: 0.81 of the peak measured, 0.85 taken "
        "(800 of 989 TFLOP/s in a product of 8192^3 on an H100 SXM, waves left out)"
    )
    assert (memory.what, memory.taken) == ("memory", 0.8)
    assert memory.measured == pytest.approx(3000 / 3350, rel=0.01)


def test_what_a_benchmark_has_written_does_too():
    (products,) = shares(ROOT / "docs/measured/h200_kinds.json")
    assert products.kind == "h200-141g-sxm"
    assert products.measured == pytest.approx(741 / 989, rel=0.01)


def test_a_file_without_products_is_refused():
    with pytest.raises(UserError, match="has no measured products: give a profile"):
        list(shares(ROOT / "docs/measured/h200_memory.json"))


def test_the_catalog_says_what_it_takes_and_why(capsys):
    assert main(["catalog"]) == 0
    said = capsys.readouterr().out
    assert "nvidia, products in float16: 0.85 (as bfloat16: 800 of 989" in said
    assert "all other products: 0.60 (assumed: nothing was measured)" in said
