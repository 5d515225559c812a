"""What differs between JAX 0.10, 0.11 and 0.12, each difference in one small function.

Everything else calls JAX by its own names: `jax.shard_map`, `jax.jit`,
`Lowered.compile` and `jax.extend.core.jaxpr_as_fun` are the same in all three. A
version check appears nowhere but here, and asks what JAX has, not what number it bears.

| what                      | 0.10                        | 0.12                      |
|---------------------------|-----------------------------|---------------------------|
| a jaxpr and its constants | `Jaxpr` in a `ClosedJaxpr`  | one `Jaxpr`, `all_invars` |
| a scan's operands         | `num_consts`, `num_carry`   | `ft_in.unpack()`          |
| compute placed elsewhere  | `compute_on2`               | `compute_on`              |

Three things none of them has: tracing cuDNN's attention where there is no cuDNN, saying
whether JAX has opened its backend, and the products of JAX's own attention in float16
on CPUs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

from jax._src import source_info_util, xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax._src.lax import lax as _lax
from jax.experimental import compute_on as _compute_on
from jax.extend import core


def closed_jaxpr(
    like: core.ClosedJaxpr,
    *,
    invars: Sequence[core.Var],
    outvars: Sequence[Any],
    eqns: Sequence[core.JaxprEqn],
) -> core.ClosedJaxpr:
    """A program of ``eqns`` alone: a piece of ``like``, without constants.

    Args:
        like: the program they are taken from; it lends its place in the source.
        invars: what the piece reads; ``like``'s constants among it, if it reads them.
        outvars: what it returns, variables or literals.
        eqns: its equations, in order.
    """
    jaxpr = core.Jaxpr(
        (),
        list(invars),
        list(outvars),
        list(eqns),
        effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        # The names of `like`'s arguments are not those of the piece.
        debug_info=like.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return core.ClosedJaxpr(jaxpr, ())


def as_closed(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
    """An equation's inner program with its constants, whatever its form.

    `remat` holds an open jaxpr, `jit`, `scan` and the custom derivatives a closed one;
    from 0.12 on both are one type.
    """
    if isinstance(jaxpr, core.ClosedJaxpr):
        return jaxpr
    assert not jaxpr.constvars, "an open jaxpr inside an equation has no constants"
    return core.ClosedJaxpr(jaxpr, ())


def all_invars(closed: core.ClosedJaxpr) -> list[core.Var]:
    """The variables of ``closed``'s constants, then those of its arguments."""
    return [*closed.jaxpr.constvars, *closed.jaxpr.invars]


def evaluate_equation(eqn: core.JaxprEqn, *inputs: Any) -> list[Any]:
    """The outputs of one equation, evaluated or traced in the equation's own context.

    The context holds what ``with`` blocks of the traced code had set (compute type,
    mesh, XLA metadata); the name stack and the source line go along, so that profiles
    and errors keep pointing into the model.
    """
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    origin = source_info_util.user_context(eqn.source_info.traceback, name_stack=names)
    with origin, eqn.ctx.manager:
        outputs = eqn.primitive.bind(
            *inputs, **eqn.primitive.get_bind_params(eqn.params)
        )
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """A scan's parts. Its operands, and its body's, are constants, carry, then rows."""

    body: core.ClosedJaxpr
    """One iteration: (constants, carry, a row) -> (carry, a row of outputs)."""

    length: int
    """Iterations."""

    num_consts: int
    """Operands that every iteration reads whole."""

    num_carry: int
    """Operands that an iteration replaces for the next."""

    reverse: bool
    """Whether the last row comes first."""

    @classmethod
    def of(cls, eqn: core.JaxprEqn) -> "Scan":
        """The parts of ``eqn``, which must be a scan."""
        assert eqn.primitive.name == "scan", eqn.primitive.name
        params = eqn.params
        if "ft_in" in params:
            num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
        else:
            num_consts, num_carry = params["num_consts"], params["num_carry"]
        return cls(
            body=as_closed(params["jaxpr"]),
            length=params["length"],
            num_consts=num_consts,
            num_carry=num_carry,
            reverse=params["reverse"],
        )


def compute_on(
    f: Callable[..., Any], *, compute_type: str, out_memory_spaces: Any
) -> Callable[..., Any]:
    """``f``, run by ``compute_type`` (as ``"device_host"``) when traced under `jit`.

    ``out_memory_spaces`` is a `jax.memory.Space`, or a tree of them like the outputs.
    """
    name = "compute_on2" if hasattr(_compute_on, "compute_on2") else "compute_on"
    place = getattr(_compute_on, name)
    return place(f, compute_type=compute_type, out_memory_spaces=out_memory_spaces)


@contextlib.contextmanager
def cudnn_traceable() -> Generator[None]:
    """Lets cuDNN's attention be traced, though not compiled, on any machine.

    JAX asks for the library's version before it traces. The answers given here are a
    recent version's on Ampere: what it refuses then, some kind would refuse.
    """
    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda: 91100,
        "check_compute_capability": lambda capability: capability <= "8.0",
        "is_cuda_compute_capability_equal": lambda capability: capability == "8.0",
    }
    asked = {name: getattr(_cudnn, name) for name in answers if hasattr(_cudnn, name)}
    try:
        for name in asked:
            setattr(_cudnn, name, answers[name])
        yield
    finally:
        for name, function in asked.items():
            setattr(_cudnn, name, function)


def has_started() -> bool:
    """Whether JAX has opened its backend: its platform and devices then stand."""
    return xla_bridge.backends_are_initialized()


@functools.cache
def float16_products_on_cpus() -> None:
    """From now on CPUs take float16 products that ask to be summed in float32.

    `jax.nn.dot_product_attention` asks for them by name in float16. XLA's CPUs compute
    so anyway and ignore the name, but JAX refuses to lower it for them (not so the same
    of bfloat16). Without this no stand-in for an old card could run that attention.
    """
    refused = _lax.DotAlgorithmPreset.F16_F16_F32
    original = _lax._handle_dot_precision

    def handle(ctx: Any, lhs: Any, rhs: Any, precision: Any, platform: str) -> Any:
        if platform == "cpu" and precision is refused:
            platform = "default"
        return original(ctx, lhs, rhs, precision, platform)

    _lax._handle_dot_precision = handle
