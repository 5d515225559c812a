"""Seconds of a matrix product on one device: small and thin ones are less efficient.

    Product, samples, tensor degree -> shapes -> tiles, waves, memory -> seconds

A library cuts the result into tiles, one a multiprocessor at a time, and takes the tile
size that ends first. What stands over a whole number of waves leaves multiprocessors
idle; each tile fills its pipeline before it computes; and no product is faster than
its operands arrive.
"""

import dataclasses
import math

from hexijax.costs.rates import Rate
from hexijax.layers.layer import BACKWARD_PRODUCTS, Product

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of a tile, and its speed: smaller ones load more an operation."""

PIPELINE_INNER = 128
"""Steps of the summed dim that filling and emptying a tile's pipeline takes."""

KERNEL_S = 4e-6
"""Between two kernels of a program on a GPU; what no product is faster than."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    rows: float
    inner: float
    columns: float
    count: float


def forward_s(product: Product, samples: int, tensor: int, rate: Rate) -> float:
    """Seconds of a forward's equal products for a microbatch."""
    shape = _shape(product, samples, tensor)
    if product.fused:
        return KERNEL_S + _flops(shape) / rate.attention_flops_per_s[0]
    return _seconds(shape, product.shared, rate)


def backward_s(product: Product, samples: int, tensor: int, rate: Rate) -> float:
    """Of the products that make the operands' gradients: two, as a rule."""
    if not product.back:
        return 0.0
    s = _shape(product, samples, tensor)
    if product.fused:
        flops = BACKWARD_PRODUCTS * _flops(s)
        return KERNEL_S + flops / rate.attention_flops_per_s[1]
    left = _Shape(s.rows, s.columns, s.inner, s.count)
    right = _Shape(s.inner, s.rows, s.columns, s.count)
    made = (left, right)[: product.back]
    return sum(_seconds(shape, product.shared, rate) for shape in made)


def _shape(product: Product, samples: int, tensor: int) -> _Shape:
    """On one device: a weight is split along its longer dim, attention by heads."""
    rows, inner, columns = product.rows, product.inner, product.columns
    if not product.shared:
        return _Shape(rows, inner, columns, product.count * samples / tensor)
    if inner > columns:
        return _Shape(rows * samples, inner / tensor, columns, product.count)
    return _Shape(rows * samples, inner, columns / tensor, product.count)


def _flops(s: _Shape) -> float:
    return 2.0 * s.rows * s.inner * s.columns * s.count


def _seconds(s: _Shape, shared: bool, rate: Rate) -> float:
    """``count`` products: one after another if shared, else one batched kernel."""
    kernels, at_once = (s.count, 1.0) if shared else (1.0, s.count)
    operands = s.rows * s.inner + s.inner * s.columns + s.rows * s.columns
    memory_s = operands * at_once * rate.item_bytes / rate.memory_bytes_per_s
    return kernels * (KERNEL_S + max(_compute_s(s, at_once, rate), memory_s))


def _compute_s(s: _Shape, at_once: float, rate: Rate) -> float:
    if rate.compute_units is None:
        return 2.0 * s.rows * s.inner * s.columns * at_once / rate.flops_per_s
    a_unit = rate.flops_per_s / rate.compute_units
    deep = s.inner + PIPELINE_INNER
    return min(
        math.ceil(
            math.ceil(s.rows / rows)
            * math.ceil(s.columns / columns)
            * at_once
            / rate.compute_units
        )
        * (2.0 * rows * columns * deep / (a_unit * speed))
        for rows, columns, speed in TILES
    )
