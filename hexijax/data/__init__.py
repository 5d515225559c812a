"""Where batches come from: windows over text or tokens, or documents packed into them.

    text files -> TextBytes, Text -+-> windows of a flat array -+
    token file -> TokenFile -------+                            +-> shuffled, endless
    text, .jsonl, saved dataset ---> Packed: windows of pieces -+   batches
    RandomTokens -> drawn, endless batches

A batch is ``{"inputs": int32 [B, length], "targets": int32 [B, length]}``, the targets
being the inputs one position on: two arrays and not one, so that each stage of a
pipeline loads only what it reads. ``Packed`` adds ``segments``, ``positions`` and
``weights``.
"""

from hexijax.data.packed import Packed
from hexijax.data.random import RandomTokens
from hexijax.data.text import TextBytes
from hexijax.data.texts import Text
from hexijax.data.tokenizer import Tokenizer
from hexijax.data.tokens import TokenFile, open_data

__all__ = [
    "Packed",
    "RandomTokens",
    "Text",
    "TextBytes",
    "TokenFile",
    "Tokenizer",
    "open_data",
]
