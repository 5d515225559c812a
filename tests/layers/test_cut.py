"""Layers are found by names, cut where the fewest bytes cross; markers overrule."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import zoo
from jax.ad_checkpoint import checkpoint_name

from hexijax.layers.chain import Remat
from hexijax.layers.trace import TracedModel, trace_model

WIDTH = 8
MATRIX = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
BATCH = {"x": jax.ShapeDtypeStruct((3, 5, WIDTH), jnp.float32)}


def traced(params: Any, apply: Callable[..., Any]) -> TracedModel:
    def loss(params: Any, batch: Mapping[str, Any], keys: Any) -> Any:
        y = apply(params, batch["x"])
        return jnp.square(y).sum((1, 2)), jnp.ones(len(y))

    return trace_model(loss, params, BATCH, microbatch_size=3)


def block(p: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ p["up"]["w"]) @ p["down"]["w"]


BLOCK = {"up": {"w": MATRIX}, "down": {"w": MATRIX}}


def in_order(params: Any, x: Any) -> Any:
    for leaf in jax.tree.leaves(params, is_leaf=lambda p: "up" in p):
        x = block(leaf, x)
    return x


@pytest.mark.parametrize("depth", [1, 2, 7, 64])
def test_each_block_is_a_layer(depth: int):
    model = traced({"blocks": [BLOCK] * depth}, lambda p, x: in_order(p["blocks"], x))
    assert model.layering.names == tuple(f"blocks/{i}" for i in range(depth))
    groups = [group for group, _ in model.layering.groups]
    assert [group.layers for group in groups] == [(i,) for i in range(depth)]
    border = jax.ShapeDtypeStruct((3, 5, WIDTH), jnp.float32)
    segments = [model.segment(i, i + 1, (Remat.NONE,)) for i in range(depth)]
    assert all(s.border_out == (border,) for s in segments[:-1])


def test_other_ways_to_number_blocks():
    def flat(p: Any, x: Any) -> Any:
        for name in ("h_0", "h_1", "h_2"):
            x = block(p[name], x)
        return x @ p["out"]

    params = {f"h_{i}": BLOCK for i in range(3)} | {"out": MATRIX}
    assert traced(params, flat).layering.names == ("h_0", "h_1", "h_2", "head")


def test_linen_numbers_every_module_and_only_blocks_are_layers():
    def apply(p: Any, x: Any) -> Any:
        x = x @ p["Dense_0"]["kernel"]
        x = block(p["Block_1"], block(p["Block_0"], x))
        return x @ p["Dense_1"]["kernel"]

    params = {f"Dense_{i}": {"kernel": MATRIX} for i in range(2)}
    params |= {f"Block_{i}": BLOCK for i in range(2)}
    names = traced(params, apply).layering.names
    assert names == ("embed", "Block_0", "Block_1", "head")


def test_a_plain_stack_of_dense_modules_is_cut_between_them():
    def apply(p: Any, x: Any) -> Any:
        for i in range(3):
            x = jnp.tanh(x @ p[f"Dense_{i}"]["kernel"])
        return x

    params = {f"Dense_{i}": {"kernel": MATRIX} for i in range(3)}
    assert traced(params, apply).layering.names == ("Dense_0", "Dense_1", "Dense_2")


def test_blocks_inside_stages_are_the_layers():
    stages = {"stages": [{"blocks": [BLOCK] * 2}] * 2}

    def apply(p: Any, x: Any) -> Any:
        for stage in p["stages"]:
            x = in_order(stage["blocks"], x)
        return x

    assert traced(stages, apply).layering.names == tuple(
        f"stages/{i}/blocks/{j}" for i in range(2) for j in range(2)
    )


def test_experts_inside_a_block_are_no_layers():
    params = {"inp": MATRIX, "blocks": [{"experts": [BLOCK] * 3}] * 2}

    def apply(p: Any, x: Any) -> Any:
        x = x @ p["inp"]
        for layer in p["blocks"]:
            y = sum(block(expert, x) for expert in layer["experts"])
            x = x + y
        return x

    names = traced(params, apply).layering.names
    assert names == ("embed", "blocks/0", "blocks/1")


def test_numbered_norms_inside_a_block_are_no_layers():
    norms = {
        f"ln_{i}": {"scale": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}
        for i in (1, 2)
    }

    def apply(p: Any, x: Any) -> Any:
        for layer in p["blocks"]:
            x = block(layer, x * layer["ln_1"]["scale"]) * layer["ln_2"]["scale"]
            x = x + jnp.tanh(x @ layer["mlp"]["w"])
        return x

    params = {"blocks": [{**BLOCK, **norms, "mlp": {"w": MATRIX}}] * 2}
    assert traced(params, apply).layering.names == ("blocks/0", "blocks/1")


def test_encoder_and_decoder_follow_each_other():
    params = {"encoder": {"layers": [BLOCK] * 2}, "decoder": {"layers": [BLOCK] * 2}}

    def apply(p: Any, x: Any) -> Any:
        seen = in_order(p["encoder"]["layers"], x)
        for layer in p["decoder"]["layers"]:
            x = block(layer, x) + seen.mean(1, keepdims=True)
        return x

    model = traced(params, apply)
    assert model.layering.names == (
        "encoder/layers/0",
        "encoder/layers/1",
        "decoder/layers/0",
        "decoder/layers/1",
    )
    # What the encoder saw goes on through the decoder's borders.
    borders = [len(model.segment(i, i + 1, (Remat.NONE,)).border_in) for i in range(4)]
    assert borders == [0, 1, 1, 2]


def test_markers_overrule_names():
    def apply(p: Any, x: Any) -> Any:
        x = block(p["blocks"][0], x)
        x = checkpoint_name(x, "layer:middle")
        x = block(p["blocks"][1], block(p["blocks"][2], x))
        return checkpoint_name(x, "layer:end")

    model = traced({"blocks": [BLOCK] * 3}, apply)
    assert model.layering.names == ("embed", "middle", "end")


def test_a_marker_in_a_loop_is_numbered():
    def apply(p: Any, x: Any) -> Any:
        for i in range(3):
            x = block(p[i], checkpoint_name(x @ p[i]["up"]["w"], "layer:turn"))
        return x

    names = traced([BLOCK] * 3, apply).layering.names
    assert names == ("embed", "turn/0", "turn/1", "turn/2")


def test_a_model_without_blocks_is_one_layer_and_says_so():
    model = traced({"a": MATRIX, "b": MATRIX}, lambda p, x: x @ p["a"] @ p["b"])
    assert model.layering.names == ("model",)
    assert "No numbered blocks" in model.chain.notes[0]
    assert 'checkpoint_name(x, "layer:NAME")' in model.chain.notes[0]


def test_blocks_used_in_turns_are_one_layer_and_it_says_where():
    def apply(p: Any, x: Any) -> Any:
        first, second = p["blocks"]
        x = x @ first["up"]["w"]
        x = x @ second["up"]["w"]
        x = x @ first["down"]["w"]
        return x @ second["down"]["w"]

    model = traced({"blocks": [BLOCK] * 2}, apply)
    assert model.layering.names == ("model",)
    note = model.chain.notes[0]
    line = apply.__code__.co_firstlineno
    assert note.startswith("blocks/0 is used again, at ")
    again, begins = note.split(", after blocks/1 has begun, at ")
    assert f"test_cut.py:{line + 4} (" in again
    assert f"test_cut.py:{line + 3} (" in begins
    assert ", so that no cut parts them: the model is one layer. Mark" in begins
    assert note.endswith('with jax.ad_checkpoint.checkpoint_name(x, "layer:NAME").')


def test_a_marker_that_cannot_start_a_layer_says_so():
    @jax.checkpoint
    def inner(p: Any, x: Any) -> Any:
        return block(p, checkpoint_name(x, "layer:middle"))

    def apply(p: Any, x: Any) -> Any:
        return inner(p["blocks"][1], block(p["blocks"][0], x))

    model = traced({"blocks": [BLOCK] * 2}, apply)
    assert model.layering.names == ("blocks/0", "blocks/1")
    (note,) = model.chain.notes
    assert note.startswith("The marker middle stands inside a `")
    assert "test_cut.py" in note
    assert note.endswith("it starts no layer. Put it before or after.")


def test_tied_and_unread_parameters_have_groups():
    params = {"table": MATRIX, "blocks": [BLOCK] * 2, "spare": MATRIX}

    def apply(p: Any, x: Any) -> Any:
        return in_order(p["blocks"], x @ p["table"]) @ p["table"].T

    chain = traced(params, apply).chain
    groups = {group.name: group for group in chain.groups}
    assert groups["table"].layers == (0, 3)
    assert groups["unused"].layers == (3,)
    assert chain.layers[0].groups == ("table",)
    assert chain.layers[3].groups == ("table", "unused")
    assert "1 parameters are never read, their gradient is zero: spare." in chain.notes


def test_what_needs_the_batch_alone_is_made_again_and_not_sent():
    model = trace_model(
        zoo.case("gpt").loss, zoo.case("gpt").params, zoo.tokens(), microbatch_size=3
    )
    borders = [len(border) for border in model.layering.borders[1:-1]]
    assert borders == [1] * (len(model.layering) - 1)
    assert [layer.batch for layer in model.chain.layers] == [
        ("inputs",),
        (),
        (),
        ("targets",),
    ]


def test_a_scan_over_layers_is_unrolled_and_one_over_time_is_not():
    stacked = {"blocks": {"w": jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32)}}

    def layers(p: Any, x: Any) -> Any:
        scan = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
        return jax.lax.scan(scan, x, p["blocks"]["w"], reverse=True)[0]

    def time(p: Any, x: Any) -> Any:
        def step(h: Any, x_BD: Any) -> Any:
            h = jnp.tanh(h @ p["blocks"]["w"][0] + x_BD)
            return h, h

        x = jnp.swapaxes(x, 0, 1)
        return jnp.swapaxes(jax.lax.scan(step, x[0], x)[1], 0, 1)

    model = traced(stacked, layers)
    assert model.layering.names == tuple(f"blocks/{i}" for i in reversed(range(4)))
    leaf = model.layering.groups[0][0].leaves[0]
    assert (leaf.id, leaf.shape) == ("blocks/w[3]", (1, WIDTH, WIDTH))
    assert traced(stacked, time).layering.names == ("model",)


def test_chains_survive_json():
    case = zoo.case("gpt")
    chain = trace_model(
        case.loss, case.params, case.batch, microbatch_size=3, name="gpt"
    ).chain
    again = type(chain).from_json(chain.to_json())
    assert dataclasses.asdict(again) == dataclasses.asdict(chain)
    assert again.fingerprint() == chain.fingerprint()
