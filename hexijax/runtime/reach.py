"""How far an optax optimizer looks, found by tracing its update.

    optimizer, parameters -> classify -> ELEMENTWISE | PER_LEAF, or refused by name

Element-wise: any box of a leaf can be updated alone. Inside one leaf (norms of a leaf,
matrix updates): the leaf's state has one home. Across leaves: refused, with the
Experiment field that does the same thing globally, where there is one.
"""

import dataclasses
import enum
import functools
from collections.abc import Collection, Container, Iterator, Sequence
from typing import Any

import jax

from hexijax.errors import UserError
from hexijax.layers import jaxprs
from hexijax.layers.names import path_name

ELEMENTWISE_PRIMITIVES = jaxprs.words(
    """
    abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos cosh
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log
    log1p logistic lt max min mul ne neg nextafter not optimization_barrier or pow pvary
    real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
    """
)

INLINED = jaxprs.words("jit pjit closed_call custom_jvp_call")
"""Calls of a program that a walk goes into."""

COMPARED = jaxprs.words("lt le gt ge min max")
"""What a limit on a norm goes through."""


class OptimizerError(UserError):
    """The optimizer cannot be split over the cluster as it stands."""


class Reach(enum.Enum):
    """How far an update looks."""

    ELEMENTWISE = "element-wise"
    PER_LEAF = "inside one leaf"


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """Which leaves a traced value depends on, and whether still element by element."""

    leaves: frozenset[str] = frozenset()
    elementwise: bool = True

    through: frozenset[str] = frozenset()
    """Primitives, not element-wise, that it went through."""

    mixer: str = ""
    """The first of them before it met another leaf."""

    rooted: bool = False
    """Whether what mixes the leaves was a sum whose root was taken, a norm."""

    limited: bool = False
    """Whether that norm was held against a limit."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """An update as a program, its inputs and outputs by name."""

    closed: Any
    names: tuple[str, ...]
    """Of the parameters: the first inputs (gradients), the last (parameters), and the
    first outputs."""

    owners: tuple[str | None, ...]
    """Of the arrays of the state, in between: whose they are."""

    state: Any
    """The state's shapes."""

    @classmethod
    def of(cls, optimizer: Any, params: Any) -> "Traced":
        """The update of a parameter tree of arrays or shapes; asked for again it is not
        traced again, which takes half a second of a large model's."""
        leaves, tree = jax.tree.flatten(params)
        shapes = tuple((tuple(p.shape), jax.numpy.dtype(p.dtype)) for p in leaves)
        try:
            hash(optimizer)
        except TypeError:
            return _traced.__wrapped__(optimizer, tree, shapes)
        return _traced(optimizer, tree, shapes)


@functools.lru_cache(maxsize=2)
def _traced(
    optimizer: Any, tree: Any, like: tuple[tuple[tuple[int, ...], Any], ...]
) -> Traced:
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in like]
    shapes = jax.tree.unflatten(tree, structs)
    with_path = jax.tree_util.tree_leaves_with_path(shapes)
    names = tuple(path_name(path) for path, _ in with_path)
    known = frozenset(names)
    state = jax.eval_shape(optimizer.init, shapes)
    paths = jax.tree_util.tree_leaves_with_path(state)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return optimizer.update(grads, state, params)

    return Traced(
        closed=jax.make_jaxpr(update)(shapes, state, shapes),
        names=names,
        owners=tuple(owner_of(path_name(path), known) for path, _ in paths),
        state=state,
    )


def classify(optimizer: Any, params: Any, *, frozen: Collection[str] = ()) -> Reach:
    """How far ``optimizer`` looks, for a parameter tree of arrays or shapes.

    What becomes of the parameters in ``frozen`` is not looked at: they do not train.

    Raises:
      OptimizerError: an update of one leaf depends on another leaf's gradient or
        parameter; the message names the primitive and the leaves.
    """
    traced = Traced.of(optimizer, params)
    names, owners, jaxpr = traced.names, traced.owners, traced.closed.jaxpr
    inputs = [*names, *owners, *names]
    seen = [_Seen(frozenset([n] if n else [])) for n in inputs]
    outputs = _walk(jaxpr, [_Seen()] * len(jaxpr.constvars), seen)
    reach = Reach.ELEMENTWISE
    for name, out in zip([*names, *owners], outputs, strict=True):
        if name in frozen:
            continue
        if name and out.leaves - {name}:
            raise _across(name, out, traced)
        if not name and len(out.leaves) > 1:
            raise _across(min(out.leaves), out, traced)
        if not out.elementwise or (not name and out.leaves):
            reach = Reach.PER_LEAF
    return reach


def _across(name: str, seen: _Seen, traced: Traced) -> OptimizerError:
    others = sorted(seen.leaves - {name})
    listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return OptimizerError(
        f"The optimizer's update of {name!r} depends on other leaves ({listed}) "
        f"through `{seen.mixer or 'add'}`: those live on other devices. "
        f"{_instead(seen, traced)}"
    )


def _instead(seen: _Seen, traced: Traced) -> str:
    """What to do, by what the optimizer does: its state says, or the way it mixes."""
    kinds = {type(node).__name__ for node in _nodes(traced.state)}
    if "MultiStepsState" in kinds:
        return (
            "It accumulates gradients (optax.MultiSteps), which every plan does by "
            "itself, in microbatches: leave it out and set the Experiment's "
            "batch_size to that of a whole step."
        )
    finite = not seen.through.isdisjoint({"reduce_and", "is_finite"})
    if "ApplyIfFiniteState" in kinds or finite:
        return (
            "It leaves steps out that are not finite (optax.apply_if_finite): take it "
            "away and set the Experiment's skip_nonfinite=True, which looks at the "
            "gradients of all devices."
        )
    if seen.limited and "reduce_sum" in seen.through:
        return (
            "It limits the norm of all gradients (optax.clip_by_global_norm): take it "
            "out and set the Experiment's clip_norm, the norm over all devices."
        )
    return (
        "Nothing in an Experiment does the same. Use an optimizer whose update of a "
        "parameter follows from that parameter's gradients alone, as AdamW's, Muon's "
        "or Adafactor's."
    )


def _nodes(tree: Any) -> Iterator[Any]:
    """A state's nodes, from the outside in."""
    yield tree
    for node in jax.tree.leaves(tree, is_leaf=lambda x: x is not tree):
        if node is not tree:
            yield from _nodes(node)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Programs that an equation holds."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found


def _walk(jaxpr: Any, consts: list[_Seen], args: list[_Seen]) -> list[_Seen]:
    env: dict[Any, _Seen] = dict(zip(jaxpr.constvars, consts, strict=False))
    env.update(zip(jaxpr.invars, args, strict=False))

    def read(atom: Any) -> _Seen:
        return _Seen() if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(a) for a in eqn.invars]
        inner = inner_jaxprs(eqn)
        if len(inner) == 1 and eqn.primitive.name in INLINED:
            (body,) = inner
            outs = _walk(body, [_Seen()] * len(body.constvars), ins)
        else:
            outs = [_after(eqn, ins)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _after(eqn: Any, ins: Sequence[_Seen]) -> _Seen:
    """What an equation makes of what it reads."""
    name = eqn.primitive.name
    leaves = frozenset[str]().union(*(i.leaves for i in ins))
    through = frozenset[str]().union(*(i.through for i in ins))
    pointwise = name in ELEMENTWISE_PRIMITIVES or not leaves
    # Broadcasting a scalar or adding dims moves no element onto another.
    if name == "broadcast_in_dim":
        operand = eqn.invars[0].aval
        pointwise = operand.size == 1 or operand.size == eqn.outvars[0].aval.size
    if leaves and (not pointwise or name == "is_finite"):
        through |= {name}
    mixer = next((i.mixer for i in ins if i.mixer), "")
    if not mixer and len(leaves) > 1 and all(len(i.leaves) < 2 for i in ins):
        reduced = sorted(r for i in ins for r in i.through if r != "is_finite")
        mixer = next(iter(reduced), name)
    return _Seen(
        leaves,
        not leaves or (all(i.elementwise for i in ins) and pointwise),
        through,
        mixer,
        any(i.rooted or (len(i.leaves) > 1 and name == "sqrt") for i in ins),
        any(i.limited or (i.rooted and name in COMPARED) for i in ins),
    )


def owner_of(path: str, names: Container[str]) -> str | None:
    """The parameter that an array of the optimizer state belongs to, None if shared.

    A moment's path ends in its parameter's: ``0/mu/blocks/3/kernel``.
    """
    while path not in names:
        _, parted, path = path.partition("/")
        if not parted:
            return None
    return path
