"""Published model shapes by name.

    get_config("llama", "7B", dtype="bfloat16") -> LlamaConfig

A name in billions or millions is the usual one of that shape; ``config.num_params`` is
the exact count and lies within 4 % of it (Llama's 30B has 32.5 billion). GPT
vocabularies are padded from 50257 to 50304, so that the table splits evenly.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from models.bert import BertConfig
from models.config import TransformerConfig
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.vit import ViTConfig


def _gpt(depth: int, width: int, num_heads: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=50304,
        width=width,
        depth=depth,
        num_heads=num_heads,
        ff_width=4 * width,
        max_length=2048,
    )


def _llama(
    depth: int, width: int, ff_width: int, num_kv_heads: int | None = None
) -> LlamaConfig:
    num_heads = width // 128
    return LlamaConfig(
        vocab_size=32000,
        width=width,
        depth=depth,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        ff_width=ff_width,
    )


def _bert(depth: int, width: int) -> BertConfig:
    return BertConfig(
        vocab_size=30522,
        width=width,
        depth=depth,
        num_heads=width // 64,
        ff_width=4 * width,
    )


def _vit(depth: int, width: int, ff_width: int, num_heads: int) -> ViTConfig:
    return ViTConfig(width=width, depth=depth, num_heads=num_heads, ff_width=ff_width)


GPT: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "125M": _gpt(12, 768, 12),
        "350M": _gpt(24, 1024, 16),
        "1.3B": _gpt(24, 2048, 16),
        "2B": _gpt(24, 2560, 32),
        "2.7B": _gpt(32, 2560, 32),
        "4B": _gpt(34, 3072, 24),
        "6B": _gpt(28, 4096, 32),
        "6.7B": _gpt(32, 4096, 32),
        "12B": _gpt(60, 4096, 32),
        "22B": _gpt(48, 6144, 48),
    }
)
LLAMA: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        "1.35B": _llama(24, 2048, 5504),
        "2.7B": _llama(12, 4096, 11008),
        "5.1B": _llama(24, 4096, 11008),
        "7B": _llama(32, 4096, 11008),
        "13B": _llama(40, 5120, 13824),
        "30B": _llama(60, 6656, 17920),
        "70B": _llama(80, 8192, 28672, num_kv_heads=8),
        "140B": _llama(96, 10240, 39936, num_kv_heads=8),
    }
)
BERT: Mapping[str, BertConfig] = MappingProxyType(
    {
        "base": _bert(12, 768),
        "large": _bert(24, 1024),
        "xlarge": _bert(36, 1536),
    }
)
VIT: Mapping[str, ViTConfig] = MappingProxyType(
    {
        "base": _vit(12, 768, 3072, 12),
        "huge": _vit(32, 1280, 5120, 16),
        "g-small": _vit(6, 1664, 8192, 16),
        "g": _vit(48, 1664, 8192, 16),
        "e": _vit(56, 1792, 15360, 16),
    }
)
FAMILIES: Mapping[str, Mapping[str, TransformerConfig]] = MappingProxyType(
    {"gpt": GPT, "llama": LLAMA, "bert": BERT, "vit": VIT}
)


def get_config(family: str, size: str, **overrides: Any) -> TransformerConfig:
    """The shape of that name, with fields replaced by ``overrides``."""
    sizes = _look_up("model family", family, FAMILIES)
    config = _look_up(f"{family} size", size, sizes)
    fields = [field.name for field in dataclasses.fields(config)]
    for name in overrides:
        _check_known(f"field of {type(config).__name__}", name, fields)
    return dataclasses.replace(config, **overrides)


def _look_up(what: str, name: str, table: Mapping[str, Any]) -> Any:
    _check_known(what, name, table)
    return table[name]


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"Unknown {what} {name!r}.{hint} Known: {', '.join(names)}.")
