"""A small model of each family that has a name map, and its parameters by path."""

import functools
from collections.abc import Mapping

import numpy as np
from flax import nnx

from hexijax.layers.names import flatten
from models.abstract import abstract
from models.bert import Bert, BertConfig
from models.config import TransformerConfig
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.vit import ViT, ViTConfig

SIZE = {"width": 16, "depth": 3, "num_heads": 4, "ff_width": 24}

CONFIGS: Mapping[str, tuple[type[nnx.Module], type[TransformerConfig], dict]] = {
    "llama": (Llama, LlamaConfig, {"vocab_size": 11, "num_kv_heads": 2}),
    "gpt2": (GPT, GPTConfig, {"vocab_size": 11, "max_length": 6}),
    "bert": (Bert, BertConfig, {"vocab_size": 11, "max_length": 6}),
    "vit": (ViT, ViTConfig, {"num_classes": 5, "image_size": 8, "patch_size": 4}),
}


@functools.cache
def shapes(family: str, *, stacked: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes by path."""
    model_class, config_class, fields = CONFIGS[family]
    config = config_class(**SIZE, **fields, scan_layers=stacked)
    params = nnx.to_pure_dict(nnx.state(abstract(model_class, config), nnx.Param))
    return {name: tuple(x.shape) for name, x in flatten(params).items()}


def params(
    family: str, *, stacked: bool = False, dtype: str | np.dtype = "float32"
) -> dict[str, np.ndarray]:
    """Numbers by path."""
    rng = np.random.default_rng(3)
    return {
        name: rng.normal(size=shape).astype(dtype)
        for name, shape in shapes(family, stacked=stacked).items()
    }
