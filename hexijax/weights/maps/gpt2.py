"""GPT2LMHeadModel: its Conv1D holds [in, out] as Flax does; q, k and v are fused."""

from hexijax.weights.maps.torch import norm
from hexijax.weights.names import Named, NameMap

_LAYER = "transformer.h.*"

_FUSED = {
    f"blocks/*/attention/{name}/{ours}": Named(
        name=f"{_LAYER}.attn.c_attn.{theirs}", part=(dim, i, 3)
    )
    for i, name in enumerate(("query", "key", "value"))
    for ours, theirs, dim in (("kernel", "weight", 1), ("bias", "bias", 0))
}

_CONV1D = {
    f"blocks/*/{ours}/{end}": f"{_LAYER}.{theirs}.{their_end}"
    for ours, theirs in (
        ("attention/out", "attn.c_proj"),
        ("ff/up", "mlp.c_fc"),
        ("ff/down", "mlp.c_proj"),
    )
    for end, their_end in (("kernel", "weight"), ("bias", "bias"))
}

GPT2 = NameMap(
    name="the name map 'gpt2'",
    prefix="transformer.",
    table={
        "embed/embedding": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        **norm("blocks/*/attention_norm", f"{_LAYER}.ln_1"),
        **_FUSED,
        **norm("blocks/*/ff_norm", f"{_LAYER}.ln_2"),
        **_CONV1D,
        **norm("norm", "transformer.ln_f"),
    },
    copies={"lm_head.weight": "transformer.wte.weight"},
    # Causal masks that older files kept beside the weights.
    unused=("*h.*.attn.bias", "*h.*.attn.masked_bias"),
)
