"""Small losses of every kind, with parameters and a batch: what the laws run over."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from hexijax.layers import names
from hexijax.layers.loss import linen_loss, nnx_loss
from models.bert import Bert, BertConfig
from models.gpt import GPT, GPTConfig
from models.linen_gpt import LinenGPT
from models.llama import Llama, LlamaConfig
from models.losses import classification_loss, masked_token_loss, next_token_loss
from models.vit import ViT, ViTConfig

VOCAB, LENGTH, WIDTH, DEPTH = 24, 6, 8, 2
SHAPE = {"width": WIDTH, "depth": DEPTH, "num_heads": 2, "ff_width": 16}


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss to cut."""

    loss: Callable[..., Any]
    params: Any
    batch: Mapping[str, Any]
    num_samples: int = 3

    @property
    def keys(self) -> Any:
        return jax.random.split(jax.random.key(7), self.num_samples)

    @functools.cached_property
    def reference(self) -> tuple[Any, dict[str, Any]]:
        """Sum of the loss, and its gradient by leaf."""

        def total(params: Any) -> Any:
            return jnp.sum(self.loss(params, self.batch, self.keys)[0])

        value, gradient = jax.jit(jax.value_and_grad(total))(self.params)
        return value, names.flatten(gradient)


def fill(shapes: Any, scale: float = 0.3) -> Any:
    """Numbers for a tree of shapes, each leaf's drawn by its own name."""

    def draw(path: Any, x: Any) -> Any:
        name = names.path_name(path)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        mean = 1.0 if "scale" in name else 0.0
        return jnp.asarray(rng.normal(mean, scale, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def tokens(num_samples: int = 3) -> dict[str, Any]:
    rows = np.random.default_rng(1).integers(0, VOCAB, (num_samples, LENGTH + 1))
    return {"inputs": jnp.asarray(rows[:, :-1]), "targets": jnp.asarray(rows[:, 1:])}


def next_token(model: Any, batch: Mapping[str, Any]) -> Any:
    return next_token_loss(model(batch["inputs"]), batch["targets"])


def _of(loss: Any, batch: Mapping[str, Any] | None = None) -> Case:
    return Case(loss, fill(loss.abstract_params()), batch or tokens())


def _gpt(**changes: Any) -> Case:
    config = GPTConfig(vocab_size=VOCAB, max_length=16, **{**SHAPE, **changes})
    return _of(nnx_loss(lambda rngs: GPT(config, rngs=rngs), next_token))


def _linen_gpt(**changes: Any) -> Case:
    config = GPTConfig(vocab_size=VOCAB, max_length=16, **{**SHAPE, **changes})
    return _of(linen_loss(LinenGPT(config), next_token, example=tokens()))


def _llama(**changes: Any) -> Case:
    shape = {"vocab_size": VOCAB, "num_kv_heads": 1, **SHAPE}
    config = LlamaConfig(**{**shape, **changes})
    return _of(nnx_loss(lambda rngs: Llama(config, rngs=rngs), next_token))


def _bert() -> Case:
    config = BertConfig(vocab_size=VOCAB, max_length=16, **SHAPE)
    masked = np.random.default_rng(2).random((3, LENGTH)) < 0.5
    batch = {**tokens(), "masked": jnp.asarray(masked)}

    def loss(model: Any, batch: Mapping[str, Any]) -> Any:
        logits = model(batch["inputs"])
        return masked_token_loss(logits, batch["targets"], batch["masked"])

    return _of(nnx_loss(lambda rngs: Bert(config, rngs=rngs), loss), batch)


def _vit() -> Case:
    config = ViTConfig(num_classes=5, image_size=8, patch_size=4, **SHAPE)
    images = np.random.default_rng(3).normal(size=(3, 8, 8, 3)).astype(np.float32)
    batch = {"images": jnp.asarray(images), "labels": jnp.asarray([0, 3, 4])}

    def loss(model: Any, batch: Mapping[str, Any]) -> Any:
        return classification_loss(model(batch["images"]), batch["labels"])

    return _of(nnx_loss(lambda rngs: ViT(config, rngs=rngs), loss), batch)


def _plain(num_layers: int, block: Callable[..., Any], aux: bool = False) -> Case:
    """A loss without any module: nested dicts and lists, metrics, a scalar carried."""
    params = {
        "inp": jnp.zeros((VOCAB, WIDTH)),
        "blocks": [
            {"up": {"w": jnp.zeros((WIDTH, 16))}, "down": {"w": jnp.zeros((16, WIDTH))}}
            for _ in range(num_layers)
        ],
        "out": jnp.zeros((WIDTH, VOCAB)),
        "never": jnp.zeros((3,)),
    }

    def loss(params: Any, batch: Mapping[str, Any], keys: Any) -> Any:
        x, aux_B = params["inp"][batch["inputs"]], 0.0
        for p in params["blocks"]:
            x, h = block(p, x)
            aux_B = aux_B + jnp.square(h).sum((1, 2))
        logits = (x @ params["out"]).astype(jnp.float32)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        total = ce.sum(1) + 0.01 * aux_B if aux else ce.sum(1)
        weight = jnp.full(ce.shape[0], float(LENGTH))
        hits = (logits.argmax(-1) == batch["targets"]).sum(1)
        return total, weight, {"hits": hits, "aux": (aux_B, jnp.ones_like(weight))}

    return Case(loss, fill(params), tokens())


def _mlp(p: Any, x: Any) -> Any:
    h = jax.nn.silu(x @ p["up"]["w"])
    return x + h @ p["down"]["w"], h


def _bf16(p: Any, x: Any) -> Any:
    x = x.astype(jnp.bfloat16)
    h = jax.nn.silu(x @ p["up"]["w"].astype(jnp.bfloat16))
    return x + h @ p["down"]["w"].astype(jnp.bfloat16), h.astype(jnp.float32)


@jax.custom_vjp
def _doubled(x: Any) -> Any:
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, x.shape), lambda shape, d: (3 * d,))


def _nested(p: Any, x: Any) -> Any:
    """jit in jit, remat with a cast inside, a custom derivative (a wrong one)."""

    @jax.jit
    def inner(w: Any, x: Any) -> Any:
        return jax.jit(lambda w, x: jnp.sin(x @ w))(w, x)

    @jax.checkpoint
    def outer(w: Any, x: Any) -> Any:
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype)

    h = _doubled(inner(p["up"]["w"], x))
    return x + outer(p["down"]["w"], h), h


def _scanned_remat(dtype: str = "float32") -> Case:
    """Linen: a scan over stacked blocks, each of them rematerialised."""

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any, _: Any) -> Any:
            h = linen.LayerNorm(name="norm")(x)
            h = linen.gelu(linen.Dense(16, dtype=dtype, name="up")(h))
            return x + linen.Dense(WIDTH, dtype=dtype, name="down")(h), None

    class Model(linen.Module):
        @linen.compact
        def __call__(self, inputs: Any) -> Any:
            x = linen.Embed(VOCAB, WIDTH, name="embed")(inputs)
            scan = linen.scan(
                linen.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=DEPTH,
            )
            x, _ = scan(name="layers")(x, None)
            return linen.Dense(VOCAB, name="head")(x)

    return _of(linen_loss(Model(), next_token, example=tokens()))


def _routed() -> Case:
    """A block picks rows for the next one: integers cross the border between them."""
    params = {
        "inp": jnp.zeros((VOCAB, WIDTH)),
        "blocks": [{"w": jnp.zeros((WIDTH, 5)), "rows": jnp.zeros((5, WIDTH))}] * 2,
    }

    def loss(params: Any, batch: Mapping[str, Any], keys: Any) -> Any:
        x = params["inp"][batch["inputs"]]
        choice_BT = jnp.zeros(batch["inputs"].shape, jnp.int32)
        for p in params["blocks"]:
            h = x @ p["w"]
            x = x + h @ p["rows"] + p["rows"][choice_BT]
            choice_BT = h.argmax(-1)
        total = jnp.square(x).sum((1, 2)) + 0.0 * choice_BT.sum(1)
        return total, jnp.ones(len(total))

    return Case(loss, fill(params), tokens())


def _scalar() -> Case:
    """Sums over all samples, and a large closed-over table."""
    case = _plain(2, _mlp)
    table = jnp.asarray(
        np.random.default_rng(4).normal(size=(VOCAB, 1024)), jnp.float32
    )

    def loss(params: Any, batch: Mapping[str, Any], keys: Any) -> Any:
        total, weight, metrics = case.loss(params, batch, keys)
        bias = (table[batch["targets"]].mean(-1) * params["out"][0, 0]).sum()
        return total.sum() + bias, weight.sum(), {"hits": metrics["hits"].sum()}

    return Case(loss, case.params, case.batch)


CASES: dict[str, Callable[[], Case]] = {
    "gpt": _gpt,
    "gpt-dropout": lambda: _gpt(dropout_rate=0.2),
    "gpt-bf16": lambda: _gpt(dtype="bfloat16"),
    "gpt-scanned": lambda: _gpt(scan_layers=True),
    "llama": _llama,
    "llama-tied": lambda: _llama(tied=True),
    "llama-scanned": lambda: _llama(scan_layers=True),
    "bert": _bert,
    "vit": _vit,
    "linen": _linen_gpt,
    "linen-dropout": lambda: _linen_gpt(dropout_rate=0.2),
    "linen-scanned": lambda: _linen_gpt(scan_layers=True),
    "linen-scan-remat": _scanned_remat,
    "linen-scan-remat-bf16": lambda: _scanned_remat("bfloat16"),
    "plain": lambda: _plain(2, _mlp),
    "plain-aux": lambda: _plain(2, _mlp, aux=True),
    "plain-bf16": lambda: _plain(2, _bf16),
    "plain-nested": lambda: _plain(2, _nested, aux=True),
    "routed": _routed,
    "scalar": _scalar,
}


@functools.cache
def case(name: str) -> Case:
    """One of the cases; made once."""
    return CASES[name]()
