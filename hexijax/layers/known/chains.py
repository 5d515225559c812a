"""GPT, Llama, BERT and ViT of any size as a Chain.

    sizes -> costs and leaves of embed, block, head -> Chain

``length`` is the sequence, ``dtype`` what layers compute in. A block keeps and moves
attention's scores; with ``fused_attention`` it carries beside that what it does on
kinds with cuDNN's kernel, which writes none. Names and shapes of leaves are the same.
"""

import dataclasses
from collections.abc import Mapping

from hexijax.layers.chain import (
    ITEM_BYTES,
    Array,
    Chain,
    Group,
    Layer,
    Leaf,
    Product,
    Remat,
)
from hexijax.layers.known import costs, leaves
from hexijax.layers.known.leaves import Rows
from hexijax.layers.known.terms import Bytes, Costs, Sizes, product, total, total_bytes
from hexijax.layers.layer import BACKWARD_PRODUCTS, FUSED_DTYPES

_FUSED: Bytes = {"NT": (0, 4)}
"""What fused attention keeps for its scores: a normaliser a query."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What a family's layers cost and hold."""

    embed: Costs
    block: Costs
    head: Costs
    embed_rows: Rows
    block_rows: Rows
    head_rows: Rows
    table: Rows = ()
    """Held by the embedding, and by the head too where they are tied."""
    last_border: str = "TD"
    """What the last block hands to the head."""


def gpt(
    *,
    depth: int,
    width: int,
    num_heads: int,
    length: int,
    ff_width: int | None = None,
    vocab_size: int = 50304,
    max_length: int | None = None,
    tied: bool = True,
    dtype: str = "bfloat16",
    fused_attention: bool = True,
    name: str = "gpt",
) -> Chain:
    """Decoder with learned positions, LayerNorm, GELU and biases."""
    family = _Family(
        embed=costs.TOKENS_AND_POSITIONS,
        block=costs.PRE_NORM,
        head=costs.GPT_HEAD,
        embed_rows=leaves.POSITIONS,
        block_rows=leaves.PRE_NORM,
        head_rows=leaves.GPT_HEAD if tied else leaves.GPT_HEAD + leaves.OWN_KERNEL,
        table=leaves.TABLE,
    )
    sizes = _sizes(width, num_heads, length, ff_width, V=vocab_size)
    sizes["X"] = max_length or length
    batch = {"tokens": Array(shape=(length + 1,), dtype="int32")}
    return _chain(name, family, sizes, depth, dtype, fused_attention, batch, tied)


def llama(
    *,
    depth: int,
    width: int,
    num_heads: int,
    length: int,
    ff_width: int,
    num_kv_heads: int | None = None,
    vocab_size: int = 32000,
    tied: bool = False,
    dtype: str = "bfloat16",
    fused_attention: bool = True,
    name: str = "llama",
) -> Chain:
    """Decoder with RMSNorm, rotary positions, grouped queries and SwiGLU."""
    family = _Family(
        embed=costs.TOKENS,
        block=costs.LLAMA,
        head=costs.LLAMA_HEAD,
        embed_rows=(),
        block_rows=leaves.LLAMA,
        head_rows=leaves.LLAMA_HEAD if tied else leaves.LLAMA_HEAD + leaves.OWN_KERNEL,
        table=leaves.TABLE,
    )
    sizes = _sizes(width, num_heads, length, ff_width, V=vocab_size)
    sizes["K"] = (num_kv_heads or num_heads) * sizes["H"]
    batch = {"tokens": Array(shape=(length + 1,), dtype="int32")}
    return _chain(name, family, sizes, depth, dtype, fused_attention, batch, tied)


def bert(
    *,
    depth: int,
    width: int,
    num_heads: int,
    length: int,
    ff_width: int | None = None,
    vocab_size: int = 30522,
    max_length: int = 512,
    dtype: str = "bfloat16",
    fused_attention: bool = True,
    name: str = "bert",
) -> Chain:
    """Encoder with norms after what they follow and a masked-token head."""
    family = _Family(
        embed=costs.BERT_EMBED,
        block=costs.POST_NORM,
        head=costs.BERT_HEAD,
        embed_rows=leaves.BERT_EMBED,
        block_rows=leaves.POST_NORM,
        head_rows=leaves.BERT_HEAD,
        table=leaves.TABLE,
    )
    sizes = _sizes(width, num_heads, length, ff_width, V=vocab_size)
    sizes |= {"X": max_length, "Y": 2}
    tokens = Array(shape=(length,), dtype="int32")
    masked = Array(shape=(length,), dtype="bool")
    batch = {"masked": masked, "targets": tokens, "tokens": tokens}
    return _chain(name, family, sizes, depth, dtype, fused_attention, batch, tied=True)


def vit(
    *,
    depth: int,
    width: int,
    num_heads: int,
    ff_width: int | None = None,
    image_size: int = 224,
    patch_size: int = 16,
    channels: int = 3,
    num_classes: int = 1000,
    dtype: str = "bfloat16",
    fused_attention: bool = True,
    name: str = "vit",
) -> Chain:
    """Encoder of image patches whose first token is classified."""
    family = _Family(
        embed=costs.PATCHES,
        # Its blocks attend to everything: what a causal mask costs is left out.
        block=dataclasses.replace(
            costs.PRE_NORM,
            forward=costs.POST_NORM.forward,
            moved={**costs.PRE_NORM.moved, "NTT": costs.POST_NORM.moved["NTT"]},
        ),
        head=costs.VIT_HEAD,
        embed_rows=leaves.PATCHES,
        block_rows=leaves.PRE_NORM,
        head_rows=leaves.VIT_HEAD,
        last_border="D",
    )
    length = (image_size // patch_size) ** 2 + 1
    sizes = _sizes(width, num_heads, length, ff_width, V=num_classes)
    sizes["P"] = channels * patch_size**2
    batch = {
        "images": Array(shape=(image_size, image_size, channels), dtype="float32"),
        "labels": Array(shape=(), dtype="int32"),
    }
    return _chain(name, family, sizes, depth, dtype, fused_attention, batch, tied=False)


def _sizes(
    width: int, num_heads: int, length: int, ff_width: int | None, **others: int
) -> dict[str, int]:
    assert width % num_heads == 0, f"{num_heads} heads share {width} features evenly"
    return {
        "1": 1,
        "T": length,
        "D": width,
        "F": ff_width or 4 * width,
        "N": num_heads,
        "H": width // num_heads,
        **others,
    }


def _chain(
    name: str,
    family: _Family,
    sizes: Sizes,
    depth: int,
    dtype: str,
    fused_attention: bool,
    batch: Mapping[str, Array],
    tied: bool,
) -> Chain:
    names = ["embed", *(f"blocks/{i}" for i in range(depth)), "head"]
    last = len(names) - 1
    parts = [
        (family.embed, family.embed_rows),
        *[(family.block, family.block_rows)] * depth,
        (family.head, family.head_rows),
    ]
    table = _leaves(family.table, sizes, prefix="")
    groups: list[Group] = []
    if tied:
        groups.append(Group(name=table[0].name, leaves=table, layers=(0, last)))
    for i, (layer, (_, rows)) in enumerate(zip(names, parts, strict=True)):
        own = _leaves(rows, sizes, prefix=f"{layer}/" if 0 < i < last else "")
        if i == 0 and not tied:
            own = table + own
        if own:
            groups.append(Group(name=layer, leaves=own, layers=(i,)))
    reads = {0: tuple(batch), last: tuple(batch)}
    if "targets" in batch:
        reads = {0: ("tokens",), last: ("masked", "targets")}
    if "labels" in batch:
        reads = {0: ("images",), last: ("labels",)}

    # Rows are looked up first and cast then.
    tables = tuple(
        leaf.id
        for group in groups
        for leaf in group.leaves
        if leaf.name in leaves.LOOKED_UP and "tokens" in batch
    )

    def layer(i: int, cost: Costs) -> Layer:
        border = family.last_border if i == last - 1 else "TD"
        return _layer(
            names[i],
            cost,
            sizes,
            dtype,
            groups=tuple(group.name for group in groups if i in group.layers),
            batch=reads.get(i, ()),
            uncast=tables if i == 0 and dtype != "float32" else (),
            border="" if i == last else border,
            fused_attention=fused_attention,
        )

    return Chain(
        name=name,
        layers=tuple(layer(i, cost) for i, (cost, _) in enumerate(parts)),
        groups=tuple(groups),
        batch=batch,
        dtype=dtype,
        tokens_per_sample=sizes["T"],
    )


def _leaves(rows: Rows, sizes: Sizes, *, prefix: str) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(
            name=prefix + name,
            shape=tuple(sizes[letter] for letter in letters),
            tensor_dim=dim,
        )
        for name, letters, dim in rows
    )


def _fused(cost: Costs) -> Costs:
    """The same with a kernel that keeps its output instead of scores.

    It skips what a causal mask hides, and makes the scores again in the backward.
    """

    def without(terms: Bytes, extra: Bytes) -> Bytes:
        kept = {k: v for k, v in terms.items() if k not in (costs.SCORES, "NT")}
        return kept | dict(extra)

    products = 4 * (0.5 if _is_causal(cost) else 1.0)
    gone = dict.fromkeys((costs.SCORES, "TT"), 0)
    each, always = cost.kept["TD"]
    return dataclasses.replace(
        cost,
        forward=dict(cost.forward) | gone | {"TTD": products},
        backward=dict(cost.backward) | gone | {"TTD": BACKWARD_PRODUCTS * products},
        moved=without(cost.moved, {}),
        back=without(cost.back, {}),
        kept={**without(cost.kept, _FUSED), "TD": (each + 1, always)},
        dots=without(cost.dots, _FUSED),
        joined=without(cost.joined, _FUSED),
    )


def _is_causal(cost: Costs) -> bool:
    return "TT" in cost.forward  # the mask's own arithmetic


def _products(cost: Costs, sizes: Sizes, fused: bool) -> tuple[Product, ...]:
    weights = tuple(
        Product(rows=sizes[rows], inner=sizes[inner], columns=sizes[columns], count=n)
        for rows, inner, columns, n in cost.products
    )
    if costs.SCORES not in cost.joined and not fused:
        return weights
    length, features, heads = sizes["T"], sizes["H"], sizes["N"]
    if fused:
        scores = Product(
            rows=length,
            inner=features,
            columns=length,
            count=cost.forward["TTD"] / 2 * heads,
            shared=False,
            fused=True,
        )
        return (*weights, scores)
    # The queries that share a key head are rows of one product.
    groups = sizes.get("K", sizes["D"]) // features
    shared, count = length * heads // groups, float(groups)
    scores = Product(
        rows=shared, inner=features, columns=length, count=count, shared=False
    )
    mixing = Product(
        rows=features, inner=length, columns=shared, count=count, shared=False
    )
    return (*weights, scores, mixing)


def _layer(
    name: str,
    cost: Costs,
    sizes: Sizes,
    dtype: str,
    *,
    groups: tuple[str, ...],
    batch: tuple[str, ...],
    uncast: tuple[str, ...],
    border: str,
    fused_attention: bool,
) -> Layer:
    def layer(cost: Costs, fused: Layer | None, *, is_fused: bool) -> Layer:
        item = ITEM_BYTES[dtype]
        kept = {Remat.NONE: cost.kept, Remat.DOTS: cost.dots, Remat.FULL: cost.full}
        # Equal figures come of equal work: what a signature promises.
        kind = name.split("/")[0]
        reading = tuple(Remat) if cost.reads_input else (Remat.DOTS, Remat.FULL)
        shape = " ".join(f"{letter}{size}" for letter, size in sorted(sizes.items()))
        return Layer(
            name=name,
            signature=f"{kind} {dtype}{' fused' * is_fused} {shape} -> {border}",
            groups=groups,
            batch=batch,
            uncast=uncast,
            reads_input=() if kind == "embed" else reading,
            forward_flops=total(cost.forward, sizes),
            backward_flops=total(cost.backward, sizes),
            products=_products(cost, sizes, is_fused),
            forward_bytes=float(total_bytes(cost.moved, sizes, item)),
            backward_bytes=float(total_bytes(cost.back, sizes, item)),
            border_bytes=product(border, sizes) * item if border else 0,
            activation_bytes={
                policy: total_bytes(terms, sizes, item)
                for policy, terms in kept.items()
            },
            joined_bytes=total_bytes(cost.joined, sizes, item),
            fused=fused,
        )

    fused = None
    if fused_attention and costs.SCORES in cost.kept and dtype in FUSED_DTYPES:
        fused = layer(_fused(cost), None, is_fused=True)
    return layer(cost, fused, is_fused=False)
