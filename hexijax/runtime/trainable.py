"""Which parameters do not train: asked for by name, or found in the optimizer.

    Experiment, shapes -> frozen_names -> names of parameters without a gradient

`Experiment.trainable` says which do. Whatever it says, a parameter whose update is zero
in the optimizer's traced program does not: `optax.set_to_zero`, by way of
`multi_transform`, `partition`, `selective_transform` or a last `freeze`.
"""

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hexijax.errors import UserError, did_you_mean
from hexijax.experiment import Experiment
from hexijax.layers import jaxprs
from hexijax.layers.names import flatten
from hexijax.runtime.intake import abstract_params
from hexijax.runtime.reach import INLINED, OptimizerError, Traced, inner_jaxprs

MOVES = jaxprs.words(
    "broadcast_in_dim convert_element_type copy copy_p expand_dims neg"
    " optimization_barrier real reduce_precision reshape squeeze stop_gradient"
    " transpose"
)
"""Of zeros they make zeros, and nothing else is read."""

ZERO, OTHER = "zero", "other"
"""What is known of a traced value, beside the name of the gradient that it is."""

SHOWN = 3
"""Names listed in a message."""


def frozen_names(experiment: Experiment, abstract: Any = None) -> frozenset[str]:
    """Names of the parameters that do not train.

    Args:
      experiment: what is trained, and how.
      abstract: its parameter tree, as shapes; None: ask for it.

    Raises:
      UserError: nothing trains, or what was asked for names no parameter.
      OptimizerError: the optimizer adds some parameters' gradients to them as they are.
    """
    abstract = abstract_params(experiment) if abstract is None else abstract
    names = list(flatten(abstract))
    asked = _not_asked(experiment, abstract, names)
    still, passed = _by_update(experiment.optimizer, abstract)
    frozen = asked | still
    passed -= frozen
    if passed:
        lora = _of_kind(experiment.loss, "LoRAParam") & set(names)
        if not lora or passed & lora:
            raise _climbs(passed)
        frozen |= passed
    if len(frozen) == len(names):
        raise UserError(
            f"None of the {len(names)} parameters of {experiment.name} trains "
            f"({_listed(frozen)}). {_why(experiment, still)}"
        )
    return frozenset(frozen)


def notes(experiment: Experiment, frozen: frozenset[str]) -> tuple[str, ...]:
    """What a person should know of what trains."""
    adapters = _of_kind(experiment.loss, "LoRAParam")
    kinds = _variables(experiment.loss)
    if not adapters or experiment.trainable is not None or frozen:
        return ()
    if len(adapters) == len(kinds):
        return ()
    return (
        f"The model has {len(adapters)} adapters (nnx.LoRAParam), and its base trains "
        "beside them. Experiment.trainable=nnx.LoRAParam keeps the base as it is, and "
        "saves its gradients and state.",
    )


def _why(experiment: Experiment, still: set[str]) -> str:
    if still:
        return (
            f"The optimizer's update of {len(still)} is zero whatever their gradient "
            "is: look at its masks, or at the labels of its multi_transform."
        )
    return f"Experiment.trainable is {experiment.trainable!r}: it matches none of them."


def _listed(names: set[str] | frozenset[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN])
    return shown + (", ..." if len(names) > SHOWN else "")


# What the experiment asks for.


def _not_asked(experiment: Experiment, abstract: Any, names: list[str]) -> set[str]:
    asked = experiment.trainable
    if asked is None:
        return set()
    if isinstance(asked, str):
        asked = (asked,)
    if inspect.isclass(asked):
        kinds = _variables(experiment.loss)
        if not kinds:
            raise UserError(
                f"Experiment.trainable is the kind of variable {asked.__name__}, and "
                "the loss does not know the kinds of its parameters: only those of "
                "hexijax.nnx_loss do. Give a pattern for their paths, such as "
                "'*lora*', or a function of a path."
            )
        chosen = {name for name in names if issubclass(kinds[name], asked)}
        if not chosen:
            found = sorted({kind.__name__ for kind in kinds.values()})
            raise UserError(
                f"Experiment.trainable is {asked.__name__}, and no parameter is one; "
                f"the model's are {', '.join(found)}."
            )
        return set(names) - chosen
    if callable(asked):
        return {name for name in names if not asked(name)}
    if isinstance(asked, Sequence) and all(isinstance(x, str) for x in asked):
        return set(names) - _matching(asked, names)
    return _masked(asked, abstract, names)


def _matching(patterns: Sequence[str], names: list[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = set(fnmatch.filter(names, pattern))
        if not matched:
            raise UserError(
                f"Experiment.trainable has the pattern {pattern!r}, which matches none "
                f"of the {len(names)} parameters ({_listed(set(names))}). A pattern is "
                "held against the whole path, and * stands for any part of it: "
                f"'*{pattern.strip('*')}*'.{did_you_mean(pattern, names)}"
            )
        found |= matched
    return found


def _masked(mask: Any, abstract: Any, names: list[str]) -> set[str]:
    """Of a tree of bools; one may stand for all below it, as in optax's masks."""
    try:
        whole = jax.tree.map(
            lambda m, below: jax.tree.map(lambda _: m, below), mask, abstract
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            "Experiment.trainable must be a function of a parameter's path, patterns "
            "for paths, a kind of nnx variable, or a tree of bools like the "
            f"parameters'; it is a {type(mask).__name__} that is not like them: {error}"
        ) from error
    chosen = flatten(whole)
    for name, trains in chosen.items():
        if not isinstance(trains, bool | np.bool_):
            raise UserError(
                f"Experiment.trainable has {trains!r} for {name!r}; in a tree of bools "
                "it is True (trains) or False (does not)."
            )
    return {name for name in names if not chosen[name]}


def _variables(loss: Any) -> Mapping[str, type]:
    """Kind of variable of each parameter; empty where the loss knows none."""
    kinds = getattr(loss, "variable_kinds", None)
    return kinds() if kinds is not None else {}


def _of_kind(loss: Any, kind: str) -> set[str]:
    return {
        name
        for name, found in _variables(loss).items()
        if any(base.__name__ == kind for base in found.__mro__)
    }


# What the optimizer does.


def _by_update(optimizer: Any, abstract: Any) -> tuple[set[str], set[str]]:
    """Parameters whose update is zero, and those whose update is their gradient.

    The latter only beside others: where a mask leaves them out.
    """
    traced = Traced.of(optimizer, abstract)
    jaxpr = traced.closed.jaxpr
    consts = [_of_const(x) for x in traced.closed.consts]
    inputs = [
        *traced.names,
        *(OTHER if owner else "" for owner in traced.owners),
        *(OTHER for _ in traced.names),
    ]
    outputs = _walk(jaxpr, consts, inputs)
    updates = dict(zip(traced.names, outputs, strict=False))
    still = {name for name, update in updates.items() if update == ZERO}
    passed = {name for name, update in updates.items() if update == name}
    return still, passed if len(passed | still) < len(updates) else set()


def _of_const(value: Any) -> str:
    array = np.asarray(value)
    return ZERO if array.dtype.kind == "f" and not array.any() else ""


def _walk(jaxpr: Any, consts: Sequence[str], args: Sequence[str]) -> list[str]:
    """What is known of the outputs; an empty text: it depends on no parameter."""
    env: dict[Any, str] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> str:
        return _of_const(atom.val) if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(a) for a in eqn.invars]
        inner = inner_jaxprs(eqn)
        if len(inner) == 1 and eqn.primitive.name in INLINED:
            closed = next(v for v in eqn.params.values() if hasattr(v, "jaxpr"))
            outs = _walk(inner[0], [_of_const(x) for x in closed.consts], ins)
        else:
            outs = [_after(eqn.primitive.name, ins)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _after(name: str, ins: Sequence[str]) -> str:
    """Of a product with zero the other factor is finite, or a gradient is in it."""
    zeros = [x == ZERO for x in ins]
    apart = not any(x and x != ZERO for x in ins)
    if ins and name in MOVES:
        return ins[0] if ins[0] in ("", ZERO) else OTHER
    if name in ("mul", "div") and zeros[0] and apart:
        return ZERO
    if name == "mul" and zeros[1] and apart:
        return ZERO
    if name in ("add", "add_any", "sub") and all(zeros):
        return ZERO
    if name == "select_n" and all(zeros[1:]):
        return ZERO
    return "" if apart else OTHER


def _climbs(passed: set[str]) -> OptimizerError:
    return OptimizerError(
        f"The optimizer hands {len(passed)} gradients on as they came, to be added to "
        f"their parameters ({_listed(passed)}): these would climb the loss. "
        "optax.masked leaves what its mask excludes as it is. To keep them as they "
        "are set Experiment.trainable, or give "
        "optax.multi_transform({..., 'frozen': optax.set_to_zero()}, labels)."
    )
