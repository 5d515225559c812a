"""Vision Transformer (NNX): patches, class token, learned positions.

    images_BHWC -> logits_BL, in the compute dtype

A patch embedding is a strided convolution; as a reshape and a matrix it is the same
numbers and one more dot product of the kind that everything else here is.

B batch, H height, W width in pixels, C channels, D width, S patches + 1, L classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import TransformerConfig
from models.layers import PreNormBlock, embedding_init, make_dropout, make_norm
from models.stack import make_blocks, run_blocks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig(TransformerConfig):
    """A Vision Transformer."""

    num_classes: int = 1000
    """Columns of the head."""

    image_size: int = 224
    """Height and width of an image in pixels."""

    patch_size: int = 16
    """Height and width of a patch in pixels."""

    channels: int = 3
    """Colours of a pixel."""

    norm_eps: float = 1e-6
    """Added to the variance inside the norms."""

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)  # slots: super() has no cell to read
        if self.image_size % self.patch_size:
            raise ValueError(
                f"ViTConfig.image_size {self.image_size} is no multiple of patch_size "
                f"{self.patch_size}: patches tile the image. Change one of them."
            )

    @property
    def patch_features(self) -> int:
        """Numbers in one patch."""
        return self.patch_size**2 * self.channels

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        patch = (self.patch_features + 1) * self.width
        tokens = (self.num_patches + 2) * self.width  # positions and the class token
        head = 2 * self.width + (self.width + 1) * self.num_classes
        return patch + tokens + self.depth * self.block_params + head


def to_patches(images_BHWC: jax.Array, patch_size: int) -> jax.Array:
    """Patches in reading order, each flattened row by row."""
    batch, height, width, channels = images_BHWC.shape
    rows, columns = height // patch_size, width // patch_size
    tiles = images_BHWC.reshape(
        batch, rows, patch_size, columns, patch_size, channels
    ).transpose(0, 1, 3, 2, 4, 5)
    return tiles.reshape(batch, rows * columns, patch_size**2 * channels)


class ViT(nnx.Module):
    """Image classifier."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        width, dtype = config.width, config.dtype
        self.patch = nnx.Linear(config.patch_features, width, dtype=dtype, rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((1, width), jnp.float32))
        self.positions = nnx.Param(
            embedding_init(rngs.params(), (config.num_patches + 1, width))
        )
        self.dropout = make_dropout(config, rngs)
        self.blocks = make_blocks(
            lambda rngs: PreNormBlock(config, causal=False, rngs=rngs),
            config.depth,
            stacked=config.scan_layers,
            rngs=rngs,
        )
        self.norm = make_norm(config, rngs)
        self.head = nnx.Linear(width, config.num_classes, dtype=dtype, rngs=rngs)
        self.config = config

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        config = self.config
        expected = (config.image_size, config.image_size, config.channels)
        if images_BHWC.shape[1:] != expected:
            raise ValueError(
                f"Images are {images_BHWC.shape[1:]} (height, width, channels) and the "
                f"model takes {expected}. Resize them or change the ViTConfig."
            )
        x_BSD = self.patch(to_patches(images_BHWC, config.patch_size))
        first_1D = self.class_token[...].astype(x_BSD.dtype)
        first_B1D = jnp.broadcast_to(first_1D[None], (x_BSD.shape[0], 1, config.width))
        x_BSD = jnp.concatenate([first_B1D, x_BSD], axis=1)
        x_BSD = x_BSD + self.positions[None, :].astype(x_BSD.dtype)
        x_BSD = run_blocks(self.blocks, self.dropout(x_BSD))
        return self.head(self.norm(x_BSD[:, 0]))
