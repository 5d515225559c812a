"""A published model as a Chain: parameters and activation bytes, FLOPs by formula.

    models.json -> model_chain(model) -> Chain

Parameters are given per tensor-parallel rank. What tensor parallelism divides and what
it does not follow from degrees 1 and 2, since a rank holds ``split / degree + whole``;
the source's other degrees obey it exactly, vocabulary padding included.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hexijax.layers.chain import Array, Chain, Group, Layer, Leaf, Remat
from hexijax.published.files import PublishedDataError, read, records
from hexijax.published.sailor.profile import DTYPE, signature


@functools.cache
def model_chain(folder: Path, model: str) -> Chain:
    """The model as measured: float32, no recomputation known.

    Raises:
      PublishedDataError: no such model.
    """
    data = read(folder, "sailor", "models")
    shape = next(iter(records(data, "models", model=model)), None)
    by_degree = {r["tp"]: r for r in records(data, "records", model=model)}
    if shape is None or not {1, 2} <= by_degree.keys():
        names = ", ".join(m["model"] for m in data["models"])
        raise PublishedDataError(
            f"The model {model!r} was asked for; models.json has {names}, each with "
            "tables at tensor degrees 1 and 2."
        )
    one, two = by_degree[1], by_degree[2]
    num_layers, hidden = shape["num_layers"], shape["hidden_size"]
    parts = ["embed", "first", *["block"] * (num_layers - 3), "head"]
    groups: list[Group] = []
    layers: list[Layer] = []
    for i, part in enumerate(parts):
        name = part if part in ("embed", "head") else f"blocks/{i - 1}"
        whole = 2 * two["params"][i] - one["params"][i]
        split = one["params"][i] - whole
        groups.append(
            Group(
                name=name,
                leaves=tuple(_leaves(name, split, whole, hidden)),
                layers=(i,),
            )
        )
        flops = _forward_flops(shape, part, split)
        layers.append(
            Layer(
                name=name,
                signature=signature(model, part),
                groups=(name,),
                batch=("tokens",) if part in ("embed", "head") else (),
                forward_flops=flops,
                backward_flops=2 * flops,
                products=(),
                forward_bytes=float(one["act_mem_bytes"][i]),
                backward_bytes=2.0 * one["act_mem_bytes"][i],
                border_bytes=0 if part == "head" else one["act_output_bytes"][i],
                activation_bytes=dict.fromkeys(Remat, one["act_mem_bytes"][i]),
                joined_bytes=one["act_mem_bytes"][i],
            )
        )
    return Chain(
        name=model,
        layers=tuple(layers),
        groups=tuple(groups),
        batch={"tokens": Array(shape=(shape["sequence_length"],), dtype="int32")},
        dtype=DTYPE,
        notes=("FLOPs by formula; only remat none was measured",),
        tokens_per_sample=shape["sequence_length"],
    )


def _leaves(name: str, split: int, whole: int, hidden: int) -> Iterator[Leaf]:
    """Square weights as one array, and as others what is left: biases, norms."""
    weights = split - split % (hidden * hidden)
    yield _leaf(f"{name}/weights", weights, hidden, tensor_dim=1)
    if split > weights:
        yield _leaf(f"{name}/split", split - weights, hidden, tensor_dim=1)
    yield _leaf(f"{name}/whole", whole, hidden)


def _leaf(name: str, size: int, hidden: int, tensor_dim: int | None = None) -> Leaf:
    """An array of that size, as rows of the hidden size."""
    assert size % hidden == 0, f"{name} has {size} elements, no rows of {hidden}"
    return Leaf(name=name, shape=(size // hidden, hidden), tensor_dim=tensor_dim)


def _forward_flops(shape: dict[str, Any], part: str, num_weights: int) -> float:
    """Two for each weight and token, and attention's two products."""
    tokens = shape["sequence_length"]
    if part == "embed":
        return 0.0
    if part == "head":
        vocabulary = shape["vocab_size_padded_tp1"]
        return 2.0 * tokens * shape["hidden_size"] * vocabulary
    return 2.0 * tokens * num_weights + 4.0 * tokens**2 * shape["hidden_size"]
