"""Attention of every model here: one call, so that the kernel is one choice.

B batch, T query position, S key position, N query heads, K key heads, H head features.
"""

from typing import Literal, cast

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("xla", "cudnn", None)


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool = False,
    mask_BS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention; K < N is grouped-query attention.

    ``mask_BS`` is true at the keys that may be seen; prefer ``causal`` alone where it
    does, since cuDNN then needs no T x S array. ``segments_BT`` are numbers of the
    documents packed into a sequence: none sees another. Softmax is float32 in every
    kernel. ``implementation`` is one of ``IMPLEMENTATIONS``; None is JAX's choice.
    """
    mask_B1TS = None
    if mask_BS is not None:
        batch, length = q_BTNH.shape[:2]  # cuDNN broadcasts over heads only
        mask_B1TS = jnp.broadcast_to(
            mask_BS[:, None, None, :], (batch, 1, length, k_BSKH.shape[1])
        )
    if segments_BT is not None:
        same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
        same_B1TS = same_BTS[:, None]
        mask_B1TS = same_B1TS if mask_B1TS is None else mask_B1TS & same_B1TS
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask_B1TS,
        is_causal=causal,
        implementation=cast(Literal["xla", "cudnn"] | None, implementation),
    )
