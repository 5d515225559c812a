"""The catalog's figures follow from the hardware; its cards go by many names."""

import pytest

from hexijax.cluster import ClusterError, DeviceProfile, catalog

# Operations a multiprocessor completes in one clock (a multiply-add is two), from the
# architectures' white papers; tensor rates with float32 accumulation.
VECTOR = {"float64", "float32"}
RATES: dict[str, dict[str, int]] = {
    "pascal-gp102": {"float64": 8, "float32": 256, "int8": 1024},
    "pascal-gp100": {"float64": 64, "float32": 128, "float16": 256},
    "volta-gv100": {"float64": 64, "float32": 128, "float16": 1024},
    "turing-full": {"float32": 128, "float16": 1024, "int8": 2048},
    "turing-geforce": {"float32": 128, "float16": 512, "int8": 2048},
    "ampere-ga100": {
        "float64": 64,
        "float32": 128,
        "tf32": 1024,
        "float16": 2048,
        "bfloat16": 2048,
        "int8": 4096,
    },
    "ampere-ga102-full": {
        "float32": 256,
        "tf32": 512,
        "float16": 1024,
        "bfloat16": 1024,
        "int8": 2048,
    },
    "ampere-a10g": {
        "float32": 256,
        "tf32": 256,
        "float16": 512,
        "bfloat16": 512,
        "int8": 1024,
    },
    "ampere-geforce": {
        "float32": 256,
        "tf32": 256,
        "float16": 512,
        "bfloat16": 512,
        "int8": 2048,
    },
    "ada-full": {
        "float32": 256,
        "tf32": 512,
        "float16": 1024,
        "bfloat16": 1024,
        "float8": 2048,
        "int8": 2048,
    },
    "ada-geforce": {
        "float32": 256,
        "tf32": 256,
        "float16": 512,
        "bfloat16": 512,
        "float8": 1024,
        "int8": 2048,
    },
    "hopper-gh100": {
        "float64": 128,
        "float32": 256,
        "tf32": 2048,
        "float16": 4096,
        "bfloat16": 4096,
        "float8": 8192,
        "int8": 8192,
    },
    "hopper-h20": {
        "float32": 256,
        "tf32": 512,
        "float16": 1024,
        "bfloat16": 1024,
        "float8": 2048,
        "int8": 2048,
    },
    "blackwell-gb100": {
        "float64": 128,
        "float32": 256,
        "tf32": 4096,
        "float16": 8192,
        "bfloat16": 8192,
        "float8": 16384,
        "int8": 16384,
    },
    "blackwell-geforce": {
        "float32": 256,
        "tf32": 256,
        "float16": 512,
        "bfloat16": 512,
        "float8": 1024,
        "int8": 2048,
    },
}
WANTED = """P40 P100 T4 V100-16 V100-32 A10G A30 A40 A100-40 A100-80 A800 L4 L40S
    2080 2080Ti TitanRTX 3080 3080Ti 3090 4090 5090 A6000 6000Ada H20 H100 H200 H800
    B200 GH200 MI210 MI250X MI300X TPUv4 TPUv5e TPUv5p TPUv6e 910B"""
NVIDIA = [p for p in catalog.profiles().values() if p.vendor == "nvidia"]


@pytest.mark.parametrize("card", NVIDIA, ids=lambda card: card.kind)
def test_nvidia_peaks_follow_from_units_and_clock(card: DeviceProfile):
    rates = RATES[card.architecture]
    assert card.compute_units
    assert card.boost_clock_hz
    for dtype, peak in card.dense_flops_per_s.items():
        tensor_hz = card.tensor_clock_hz or card.boost_clock_hz
        clock_hz = card.boost_clock_hz if dtype in VECTOR else tensor_hz
        derived = card.compute_units * clock_hz * rates[dtype]
        assert peak == pytest.approx(derived, rel=0.03), dtype


def test_there_are_at_least_forty_cards_each_with_a_source():
    cards = catalog.profiles().values()
    assert len(cards) >= 40
    assert all(len(card.source) > 10 for card in cards)
    assert all(catalog.get(name).kind in catalog.kinds() for name in WANTED.split())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40g-sxm"),
        ("A100-SXM4-40GB", "a100-40g-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80g-sxm"),
        ("Tesla V100-SXM2-16GB", "v100-16g-sxm"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti-11g"),
        ("NVIDIA TITAN RTX", "titan-rtx-24g"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada-48g"),
        ("AMD Instinct MI300X", "mi300x-192g"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
    ],
)
def test_drivers_names_mean_their_card(name: str, kind: str):
    assert catalog.match_device_kind(name) == kind


def test_a_name_that_is_only_near_means_no_card():
    assert catalog.match_device_kind("NVIDIA GeForce RTX 2080 SUPER") is None
    assert catalog.match_device_kind("cpu") is None


def test_unknown_kinds_get_did_you_mean():
    with pytest.raises(ClusterError) as error:
        catalog.get("h100-80-sxm")
    assert str(error.value) == (
        "kind 'h100-80-sxm' is neither in the catalog of 45 cards nor declared. Did "
        "you mean 'h100-80g-sxm'? `hexijax catalog` lists the cards; a table "
        "[kinds.NAME] declares one."
    )


@pytest.mark.parametrize(
    ("kind", "train_dtype", "extra", "cudnn"),
    [
        ("p40-24g", "float32", "cuda12", False),
        ("p100-16g-pcie", "float32", "cuda12", False),
        ("v100-16g-sxm", "float16", "cuda12", False),
        ("t4-16g", "float16", "cuda13", False),
        ("rtx3090-24g", "bfloat16", "cuda13", True),
        ("h100-80g-sxm", "bfloat16", "cuda13", True),
        ("mi210-64g", "bfloat16", "rocm", False),
        ("tpu-v5e", "bfloat16", "tpu", False),
        ("ascend-910b-64g", "bfloat16", None, False),
    ],
)
def test_what_a_card_trains_in_and_needs(
    kind: str, train_dtype: str, extra: str | None, cudnn: bool
):
    card = catalog.get(kind)
    assert card.train_dtype == train_dtype
    assert card.jax_extra == extra
    assert card.has_cudnn_attention == cudnn
    assert card.jax_runs == (card.vendor != "huawei")


def test_memory_is_what_the_card_reports_and_less_is_usable():
    assert catalog.get("h100").nominal_memory_bytes == 81_559 * 2**20
    for card in catalog.profiles().values():
        assert 0.5 <= card.usable_memory_bytes / card.nominal_memory_bytes < 1
