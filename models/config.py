"""What the configurations of all families share, and what is checked of them."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from models.attention import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """Shape and numerics of a stack of equal transformer blocks."""

    width: int
    """Features of the residual stream."""

    depth: int
    """Number of blocks."""

    num_heads: int
    """Query heads; they share ``width`` evenly."""

    ff_width: int
    """Hidden features of the feed-forward layer."""

    norm_eps: float = 1e-5
    """Added to the variance inside the norms."""

    dropout_rate: float = 0.0
    """Probability that a feature is dropped where it joins the residual stream."""

    scan_layers: bool = False
    """Stack the blocks' parameters along a leading layer dim and scan over them."""

    dtype: DTypeLike = "float32"
    """What layers compute in, kept as its name; parameters stay float32."""

    attention: str | None = None
    """Kernel: ``"xla"``, ``"cudnn"`` (half precision only) or None, JAX's choice."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        name = type(self).__name__
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ValueError(
                    f"{name}.{field.name} is {value}; at least 1 is needed."
                )
        if self.width % self.num_heads:
            raise ValueError(
                f"{name}.width {self.width} is no multiple of num_heads "
                f"{self.num_heads}: heads share the width evenly. Change one of them."
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(
                f"{name}.dropout_rate is {self.dropout_rate}; a probability below 1 is "
                "needed, and 0 turns dropout off."
            )
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(
                f"{name}.dtype is {self.dtype}; layers compute in a floating dtype, "
                "such as 'float32' or 'bfloat16'."
            )
        if self.attention not in IMPLEMENTATIONS:
            raise ValueError(
                f"{name}.attention is {self.attention!r}; known are 'xla', 'cudnn' "
                "and None (JAX chooses)."
            )

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.width // self.num_heads

    @property
    def block_params(self) -> int:
        """Parameters of one block with biases and two LayerNorms."""
        attention = 4 * self.width * (self.width + 1)
        feed_forward = 2 * self.width * self.ff_width + self.ff_width + self.width
        return attention + feed_forward + 4 * self.width
