"""Trainable arrays of each family's layers: name, letters of its dims, dim to split.

Named and ordered as in the parameter trees of this repository's modules, split by
column, then row: a plan made here belongs to the traced model too.
"""

from typing import TypeAlias

Rows: TypeAlias = tuple[tuple[str, str, int | None], ...]
"""(name, letters, the dim that tensor parallelism splits) each."""


def _norm(name: str) -> Rows:
    return (f"{name}/scale", "D", None), (f"{name}/bias", "D", None)


_ATTENTION: Rows = (
    ("attention/query/kernel", "DD", 1),
    ("attention/query/bias", "D", 0),
    ("attention/key/kernel", "DD", 1),
    ("attention/key/bias", "D", 0),
    ("attention/value/kernel", "DD", 1),
    ("attention/value/bias", "D", 0),
    ("attention/out/kernel", "DD", 0),
    ("attention/out/bias", "D", None),
)
_FEED_FORWARD: Rows = (
    ("ff/up/kernel", "DF", 1),
    ("ff/up/bias", "F", 0),
    ("ff/down/kernel", "FD", 0),
    ("ff/down/bias", "D", None),
)

PRE_NORM: Rows = (
    *_norm("attention_norm"),
    *_ATTENTION,
    *_norm("ff_norm"),
    *_FEED_FORWARD,
)
POST_NORM: Rows = (
    *_ATTENTION,
    *_norm("attention_norm"),
    *_FEED_FORWARD,
    *_norm("ff_norm"),
)
LLAMA: Rows = (
    ("attention_norm/scale", "D", None),
    ("attention/query/kernel", "DD", 1),
    ("attention/key/kernel", "DK", 1),
    ("attention/value/kernel", "DK", 1),
    ("attention/out/kernel", "DD", 0),
    ("ff_norm/scale", "D", None),
    ("ff/gate/kernel", "DF", 1),
    ("ff/up/kernel", "DF", 1),
    ("ff/down/kernel", "FD", 0),
)

LOOKED_UP = ("embed/embedding", "positions", "token_types/embedding")
"""What a layer reads rows of."""

TABLE: Rows = (("embed/embedding", "VD", 0),)
POSITIONS: Rows = (("positions", "XD", None),)
BERT_EMBED: Rows = (
    *POSITIONS,
    ("token_types/embedding", "YD", None),
    *_norm("embed_norm"),
)
PATCHES: Rows = (
    ("patch/kernel", "PD", 1),
    ("patch/bias", "D", 0),
    ("class_token", "1D", None),
    ("positions", "TD", None),
)

GPT_HEAD: Rows = _norm("norm")
LLAMA_HEAD: Rows = (("norm/scale", "D", None),)
OWN_KERNEL: Rows = (("head/kernel", "DV", 1),)
BERT_HEAD: Rows = (
    ("transform/kernel", "DD", 1),
    ("transform/bias", "D", 0),
    *_norm("norm"),
    ("logits_bias", "V", 0),
)
VIT_HEAD: Rows = (*_norm("norm"), *OWN_KERNEL, ("head/bias", "V", 0))
