"""Shapes by name: their counts, their names, and that the largest needs no memory."""

import re

import jax
import pytest
from flax import nnx

from models import sizes
from models.abstract import abstract, count_params
from models.bert import Bert
from models.gpt import GPT
from models.llama import Llama
from models.vit import ViT

CLASSES = {"gpt": GPT, "llama": Llama, "bert": Bert, "vit": ViT}
EVERY_SIZE = [(family, size) for family in CLASSES for size in sizes.FAMILIES[family]]


def test_every_family_has_its_sizes():
    assert {family: " ".join(table) for family, table in sizes.FAMILIES.items()} == {
        "gpt": "125M 350M 1.3B 2B 2.7B 4B 6B 6.7B 12B 22B",
        "llama": "1.35B 2.7B 5.1B 7B 13B 30B 70B 140B",
        "bert": "base large xlarge",
        "vit": "base huge g-small g e",
    }


@pytest.mark.parametrize(("family", "size"), EVERY_SIZE)
def test_the_formula_counts_what_is_built(family: str, size: str):
    config = sizes.get_config(family, size, scan_layers=True)
    assert config.num_params == count_params(abstract(CLASSES[family], config))


@pytest.mark.parametrize(
    ("family", "size"), [name for name in EVERY_SIZE if name[0] in ("gpt", "llama")]
)
def test_a_count_is_near_its_name(family: str, size: str):
    number, unit = re.fullmatch(r"([\d.]+)([MB])", size).groups()
    named = float(number) * {"M": 1e6, "B": 1e9}[unit]
    tolerance = 0.09 if size == "30B" else 0.04  # Llama's has 32.5 by its publishers
    counted = sizes.get_config(family, size).num_params
    assert counted == pytest.approx(named, rel=tolerance)


@pytest.mark.parametrize(
    ("family", "size", "num_params"),
    [
        ("llama", "7B", 6_738_415_616),
        ("llama", "13B", 13_015_864_320),
        ("llama", "70B", 68_976_648_192),
        ("vit", "base", 86_567_656),
    ],
)
def test_counts_of_published_checkpoints(family: str, size: str, num_params: int):
    assert sizes.get_config(family, size).num_params == num_params


@pytest.mark.parametrize(
    ("family", "size", "block_params"),
    [
        ("bert", "large", 12_596_224),
        ("bert", "xlarge", 28_331_520),
        ("gpt", "1.3B", 50_358_272),
        ("gpt", "6.7B", 201_379_840),
        ("llama", "7B", 202_383_360),
        ("vit", "g", 38_361_728),
        ("vit", "e", 67_926_784),
    ],
)
def test_blocks_are_those_of_published_measurements(
    family: str, size: str, block_params: int
):
    assert sizes.get_config(family, size).block_params == block_params


@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_largest_builds_without_memory(scan_layers: bool):
    config = sizes.get_config("llama", "140B", scan_layers=scan_layers)
    leaves = jax.tree.leaves(nnx.state(abstract(Llama, config)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert len(leaves) == 3 + 9 * (1 if scan_layers else 96)


def test_fields_can_be_replaced():
    config = sizes.get_config("llama", "7B", depth=2, dtype="bfloat16")
    assert (config.depth, config.dtype, config.width) == (2, "bfloat16", 4096)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("lama", "7B"), "Unknown model family 'lama'. Did you mean 'llama'?"),
        (("gpt", "1.2B"), "Unknown gpt size '1.2B'. Did you mean '12B'?"),
        (("vit", "??"), "Unknown vit size '??'. Known: base, huge, g-small, g, e."),
    ],
)
def test_an_unknown_name_is_met_with_a_near_one(call: tuple[str, str], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        sizes.get_config(*call)


def test_an_unknown_field_is_met_with_a_near_one():
    with pytest.raises(
        ValueError, match="field of GPTConfig 'dept'. Did you mean 'depth'"
    ):
        sizes.get_config("gpt", "125M", dept=3)
