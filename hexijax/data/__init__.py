"""Where batches come from: windows over text or token files, through grain.

    text files -> TextBytes --+
    token file -> TokenFile --+-> windows of a flat array -> shuffled, endless batches
                 RandomTokens -> drawn, endless batches

A batch is ``{"inputs": int32 [B, length], "targets": int32 [B, length]}``, the targets
being the inputs one position on: two arrays and not one, so that each stage of a
pipeline loads only what it reads.
"""

from hexijax.data.random import RandomTokens
from hexijax.data.text import TextBytes
from hexijax.data.tokens import TokenFile, open_data

__all__ = ["RandomTokens", "TextBytes", "TokenFile", "open_data"]
