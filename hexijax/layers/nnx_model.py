"""Losses of NNX modules: their variables are parameters, random states, or fixed."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hexijax.layers import jaxprs
from hexijax.layers.model_loss import ModelLoss, Written, accepted_by


def nnx_loss(
    build: Callable[..., Any],
    per_sample: Callable[..., tuple[Any, ...]],
    *,
    random: bool | None = None,
    scratch: Sequence[type] = (),
    dtype: str | None = None,
    attention: str | None = None,
) -> "NnxLoss":
    """The loss of an NNX module.

    Args:
        build: returns the module. It is called with those of ``dtype=``,
            ``attention=`` and ``rngs=`` that it accepts; without ``rngs`` its own seed
            stands, whatever the experiment's.
        per_sample: ``per_sample(model, batch[, key])``, see above.
        random: whether the module draws random numbers; None: look for its streams.
        scratch: types of variables that the forward pass writes for the loss alone to
            read (``nnx.state(model, T)``); ``nnx.Intermediate`` always is one.
        dtype: compute dtype asked of ``build``.
        attention: attention implementation asked of ``build``.
    """
    return NnxLoss(
        build=build,
        per_sample=per_sample,
        random=random,
        scratch=tuple(scratch),
        dtype=dtype,
        attention=attention,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxLoss(ModelLoss):
    """See ``nnx_loss``."""

    build: Callable[..., Any]
    """Returns the module."""

    def _module(self, rngs: Any = None) -> Any:
        offered = {"dtype": self.dtype, "attention": self.attention, "rngs": rngs}
        accepted = accepted_by(self.build)
        given = {k: v for k, v in offered.items() if k in accepted and v is not None}
        if "rngs" in accepted and rngs is None:
            given["rngs"] = nnx.Rngs(0)
        return self.build(**given)

    @functools.cached_property
    def _abstract(self) -> Any:
        """The module with shapes for arrays."""
        module = nnx.eval_shape(self._module)
        if not any(map(_holds_tracer, _modules(module))):
            return module
        # Arrays that are plain attributes do not survive an abstract build.
        with jax.ensure_compile_time_eval():
            return self._module()

    @functools.cached_property
    def _split(self) -> tuple[Any, Any, Any, Any]:
        """Graph, shapes of the parameters and of the random states, other variables
        with their values."""
        graph, params, seeds, fixed = nnx.split(
            self._abstract, nnx.Param, nnx.RngState, ...
        )
        abstract = [isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(fixed)]
        if any(abstract):
            # Compiled, so that the parameters beside them are never made.
            make = jax.jit(lambda: nnx.state(self._module(), _is_fixed))
            with jax.ensure_compile_time_eval():
                fixed = make()
        params, seeds = jax.tree.map(_struct, (params, seeds))
        return graph, params, seeds, fixed

    @property
    def _draws(self) -> bool:
        return any(map(_draws, _modules(self._abstract)))

    def init(self, key: Any) -> Any:
        """Fresh parameters: nested plain dicts of arrays."""
        module = self._module(nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def abstract_params(self) -> Any:
        """The same tree, as shapes; nothing is computed."""
        return nnx.to_pure_dict(self._split[1])

    def variable_kinds(self) -> dict[str, type]:
        """The kind of variable that each parameter is, by path."""
        return {
            "/".join(map(str, path)): getattr(variable, "type", type(variable))
            for path, variable in _flat_state(self._split[1])
        }

    def merge(self, params: Any) -> Any:
        """The module holding ``params``."""
        return self._merge(params, jax.random.key(0))

    def _merge(self, params: Any, key: Any, fixed: Any = None) -> Any:
        graph, abstract, seeds, made = self._split
        # Copies, because a variable can be written only where it was made.
        state, fixed = jax.tree.map(
            lambda x: x, (abstract, made if fixed is None else fixed)
        )
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, _seeded(seeds, key), fixed)

    def _apply(self, params: Any, arguments: tuple[Any, ...], key: Any) -> Any:
        key = jax.random.key(0) if key is None else key
        module = self._merge(params, key)
        before = {path: _value(x) for path, x in self._carried(module)}
        returned = self.per_sample(module, *arguments)
        after = {path: _value(x) for path, x in self._carried(module)}
        if any(before.get(path) is not x for path, x in after.items()):
            # A transform (nnx.jit, nnx.scan) hands all variables back, new or not.
            self._judge(self._written(params, arguments))
        return returned

    def _carried(self, module: Any) -> list[tuple[tuple[Any, ...], Any]]:
        """Variables that a step would have to hand to the next one."""
        own = (nnx.Param, nnx.RngState, nnx.Intermediate, *self.scratch)
        return [
            (path, x)
            for path, x in _flat_state(nnx.state(module))
            if not isinstance(x, own)
        ]

    def _written(self, params: Any, arguments: tuple[Any, ...]) -> list[Written]:
        """Those that come out of the forward pass as other values."""
        kinds: dict[tuple[Any, ...], type] = {}

        def run(fixed: Any, params: Any, arguments: Any) -> Any:
            module = self._merge(params, jax.random.key(0), fixed)
            old = {path: _value(x) for path, x in self._carried(module)}
            self.per_sample(module, *arguments)
            after = self._carried(module)
            kinds.update((path, type(x)) for path, x in after)
            return [(old.get(path, 0.0), _value(x)) for path, x in after]

        fixed = self._split[3]
        structs = jax.tree.map(jaxprs.struct, (fixed, params, arguments))
        jaxpr = jax.make_jaxpr(run)(*structs).jaxpr
        origins = jaxprs.forwarded(jaxpr)
        pairs = zip(origins[::2], origins[1::2], strict=True)
        return [
            Written(
                name="/".join(map(str, path)),
                kind=f"{_home(kind)}.{kind.__name__}",
                is_statistic=issubclass(kind, nnx.BatchStat),
            )
            for (path, kind), (old, new) in zip(kinds.items(), pairs, strict=True)
            if new is None or new != old
        ]

    def statistics(
        self, params: Any, batches: Iterable[Mapping[str, Any]], *, seed: int = 0
    ) -> Any:
        """The running statistics after some batches, as nested dicts."""

        @jax.jit
        def after(fixed: Any, params: Any, batch: Any, key: Any) -> Any:
            module = self._merge(params, key, fixed)
            self.per_sample(module, *self._arguments(batch, key))
            made = dict(_flat_state(nnx.state(module, _is_fixed)))
            return nnx.from_flat_state([(x, made[x]) for x, _ in _flat_state(fixed)])

        fixed = self._split[3]
        for i, batch in enumerate(batches):
            key = jax.random.fold_in(jax.random.key(seed), i)
            fixed = after(fixed, params, dict(batch), key)
        return nnx.to_pure_dict(nnx.filter_state(fixed, nnx.BatchStat))


def _value(x: Any) -> Any:
    """What a variable holds; a plain array is its own value."""
    return x.get_value() if isinstance(x, nnx.Variable) else x


def _home(kind: type) -> str:
    return "nnx" if kind.__module__.startswith("flax.nnx") else kind.__module__


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _holds_tracer(module: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in vars(module).values())


def _flat_state(state: Any) -> Sequence[tuple[tuple[Any, ...], Any]]:
    return list(nnx.to_flat_state(state))


def _is_fixed(path: Any, variable: Any) -> bool:
    """Neither a parameter nor a random state: a table, a mask."""
    kind = getattr(variable, "type", type(variable))
    return not issubclass(kind, (nnx.Param, nnx.RngState))


def _modules(module: Any) -> list[Any]:
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]


def _draws(module: Any) -> bool:
    """Whether a module holds a random stream and may use it."""
    held = vars(module).values()
    if not any(isinstance(x, nnx.Rngs | nnx.RngStream) for x in held):
        return False
    rate = getattr(module, "rate", getattr(module, "dropout_rate", None))
    return rate != 0 and not getattr(module, "deterministic", False)


def _seeded(state: Any, key: Any) -> Any:
    """Random states that follow from one key: streams by place, counts at zero."""
    flat = []
    for i, (path, variable) in enumerate(
        sorted(_flat_state(state), key=lambda x: str(x[0]))
    ):
        value = variable.get_value()
        if isinstance(variable, nnx.RngKey):
            fresh = jax.random.fold_in(key, i)
            shape = value.shape
            fresh = jax.random.split(fresh, shape) if shape else fresh
        else:
            fresh = jnp.zeros(value.shape, value.dtype)
        flat.append((path, variable.replace(fresh)))
    return nnx.from_flat_state(flat)
