"""What a program costs: operations and bytes, equation by equation.

A matrix product of M x K by K x N is 2MKN operations; an element-wise equation is one
an output element; moving and reshaping are none. Bytes are those of an unfused program
(every equation reads its inputs and writes its outputs); `fusion` has those of a fused.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

from hexijax import compat
from hexijax.layers import jaxprs, products


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Operations and bytes of some equations."""

    matmul_flops: Mapping[str, float]
    """Of matrix products and convolutions, by dtype of their first operand."""

    other_flops: float
    """Of everything else."""

    num_bytes: float
    """Read and written."""

    @property
    def flops(self) -> float:
        """All operations."""
        return self.matmul_total + self.other_flops

    @property
    def matmul_total(self) -> float:
        """Operations of matrix products and convolutions."""
        return sum(self.matmul_flops.values(), 0.0)

    def __add__(self, other: "Cost") -> "Cost":
        dtypes = {*self.matmul_flops, *other.matmul_flops}
        return Cost(
            matmul_flops={
                k: self.matmul_flops.get(k, 0.0) + other.matmul_flops.get(k, 0.0)
                for k in sorted(dtypes)
            },
            other_flops=self.other_flops + other.other_flops,
            num_bytes=self.num_bytes + other.num_bytes,
        )

    def __mul__(self, times: int) -> "Cost":
        return Cost(
            matmul_flops={k: v * times for k, v in self.matmul_flops.items()},
            other_flops=self.other_flops * times,
            num_bytes=self.num_bytes * times,
        )


NOTHING = Cost(matmul_flops={}, other_flops=0.0, num_bytes=0.0)


def program_cost(jaxpr: Any) -> Cost:
    """Cost of a program; a loop of unknown length counts one turn."""
    return functools.reduce(operator.add, map(equation_cost, jaxpr.eqns), NOTHING)


def equation_cost(eqn: Any) -> Cost:
    """Cost of one equation, with the programs it holds."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        scan = compat.Scan.of(eqn)
        return program_cost(scan.body.jaxpr) * scan.length
    if name == "cond":
        branches = [program_cost(compat.as_closed(b).jaxpr) for b in params["branches"]]
        return max(branches, key=lambda cost: cost.flops)
    if name == "while":
        return program_cost(compat.as_closed(params["body_jaxpr"]).jaxpr)
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            return program_cost(compat.as_closed(params[key]).jaxpr)
    if name in _FREE:
        return NOTHING
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    moved = float(sum(jaxprs.num_bytes(a) for a in avals if hasattr(a, "dtype")))
    out = eqn.outvars[0].aval if eqn.outvars else None
    if "dot_product_attention" in name:
        dtype, flops = str(eqn.invars[0].aval.dtype), products.attention_flops(eqn)
        return Cost(matmul_flops={dtype: flops}, other_flops=0.0, num_bytes=moved)
    if name in ("dot_general", "conv_general_dilated"):
        flops = _dot_flops(eqn) if name == "dot_general" else _conv_flops(eqn)
        dtype = str(eqn.invars[0].aval.dtype)
        return Cost(matmul_flops={dtype: flops}, other_flops=0.0, num_bytes=moved)
    if name in _MOVES or out is None:
        flops = 0
    elif name.startswith(("reduce_", "arg", "cum")) and name != "reduce_precision":
        flops = eqn.invars[0].aval.size
    elif name == "sort":
        flops = out.size * max(1, math.ceil(math.log2(max(2, out.shape[-1]))))
    else:
        flops = getattr(out, "size", 0)
    return Cost(matmul_flops={}, other_flops=float(flops), num_bytes=moved)


_FREE = jaxprs.words("""reshape squeeze expand_dims broadcast_in_dim iota name""")
"""What a compiler makes free: views, and values it can make in place."""

_MOVES = jaxprs.words(
    """concatenate convert_element_type copy copy_p dynamic_slice
    dynamic_update_slice gather pad rev scatter select_n slice split
    stop_gradient transpose"""
)
"""What moves bytes and computes nothing."""


def _dot_flops(eqn: Any) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[d] for d in contract)
    return 2.0 * eqn.outvars[0].aval.size * depth


def _conv_flops(eqn: Any) -> float:
    kernel = eqn.invars[1].aval
    features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * eqn.outvars[0].aval.size * kernel.size / features
