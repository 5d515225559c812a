"""Published models by name: ``known("gpt-2.7b", length=2048)``.

GPT vocabularies are padded from 50257 to 50304; OPT's embedding has the full width, as
planners measured it. Names in billions are the usual ones; ``num_params`` is exact.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hexijax.errors import UserError, did_you_mean
from hexijax.layers.chain import Chain
from hexijax.layers.known.chains import bert, gpt, llama, vit

Make = Callable[..., Chain]


def _gpt(depth: int, width: int, num_heads: int, **more: Any) -> Make:
    shape: dict[str, Any] = {"depth": depth, "width": width, "num_heads": num_heads}
    return functools.partial(gpt, **{"length": 2048, **shape, **more})


def _llama(
    depth: int, width: int, ff_width: int, num_kv_heads: int | None = None
) -> Make:
    return functools.partial(
        llama,
        depth=depth,
        width=width,
        ff_width=ff_width,
        num_heads=width // 128,
        num_kv_heads=num_kv_heads,
        length=4096,
    )


def _bert(depth: int, width: int) -> Make:
    return functools.partial(
        bert, depth=depth, width=width, num_heads=width // 64, length=512
    )


def _vit(depth: int, width: int, ff_width: int, patch_size: int) -> Make:
    return functools.partial(
        vit,
        depth=depth,
        width=width,
        ff_width=ff_width,
        num_heads=16,
        patch_size=patch_size,
    )


_MAKE: Mapping[str, Make] = MappingProxyType(
    {
        "gpt-125m": _gpt(12, 768, 12),
        "gpt-350m": _gpt(24, 1024, 16),
        "opt-350m": _gpt(24, 1024, 16, tied=False),
        "gpt-1.3b": _gpt(24, 2048, 16),
        "gpt-2.7b": _gpt(32, 2560, 32),
        "gpt-6.7b": _gpt(32, 4096, 32),
        "gpt-13b": _gpt(40, 5120, 40),
        "gpt-30b": _gpt(48, 7168, 56),
        "gpt-140b": _gpt(110, 10240, 80),
        "llama-1.3b": _llama(24, 2048, 5504),
        "llama-2-7b": _llama(32, 4096, 11008),
        "llama-2-13b": _llama(40, 5120, 13824),
        "llama-30b": _llama(60, 6656, 17920),
        "llama-2-70b": _llama(80, 8192, 28672, num_kv_heads=8),
        "llama-140b": _llama(96, 10240, 39936, num_kv_heads=8),
        "bert-base": _bert(12, 768),
        "bert-large": _bert(24, 1024),
        "bert-xlarge": _bert(36, 1536),
        "vit-l": _vit(24, 1024, 4096, 16),
        "vit-h": _vit(32, 1280, 5120, 14),
        "vit-g": _vit(48, 1664, 8192, 14),
        "vit-e": _vit(56, 1792, 15360, 14),
    }
)
NAMES = tuple(_MAKE)
"""What ``known`` knows."""


def known(name: str, **changes: Any) -> Chain:
    """The model of that name; ``changes`` are arguments of its family's function.

    Raises:
      UserError: no model is called so.
    """
    if name not in _MAKE:
        raise UserError(
            f"No model is called {name[:60]!r}.{did_you_mean(name, NAMES)} Known: "
            f"{', '.join(NAMES)}."
        )
    return _MAKE[name](name=name, **changes)
