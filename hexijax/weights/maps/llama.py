"""LlamaForCausalLM: no biases, and a head of its own unless it is tied.

Both turn the pairs (i, i + H / 2) of a head, so query and key keep their order.
"""

from hexijax.weights.maps.torch import linear
from hexijax.weights.names import NameMap

_LAYER = "model.layers.*"

LLAMA = NameMap(
    name="the name map 'llama'",
    prefix="model.",
    table={
        "embed/embedding": "model.embed_tokens.weight",
        "blocks/*/attention_norm/scale": f"{_LAYER}.input_layernorm.weight",
        "blocks/*/attention/query/kernel": linear(f"{_LAYER}.self_attn.q_proj.weight"),
        "blocks/*/attention/key/kernel": linear(f"{_LAYER}.self_attn.k_proj.weight"),
        "blocks/*/attention/value/kernel": linear(f"{_LAYER}.self_attn.v_proj.weight"),
        "blocks/*/attention/out/kernel": linear(f"{_LAYER}.self_attn.o_proj.weight"),
        "blocks/*/ff_norm/scale": f"{_LAYER}.post_attention_layernorm.weight",
        "blocks/*/ff/gate/kernel": linear(f"{_LAYER}.mlp.gate_proj.weight"),
        "blocks/*/ff/up/kernel": linear(f"{_LAYER}.mlp.up_proj.weight"),
        "blocks/*/ff/down/kernel": linear(f"{_LAYER}.mlp.down_proj.weight"),
        "norm/scale": "model.norm.weight",
        "head/kernel": linear("lm_head.weight"),
    },
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    unused=("*.rotary_emb.inv_freq",),
)
