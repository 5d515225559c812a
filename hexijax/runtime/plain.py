"""The plain program: one device, one ``jit``, the whole batch. Every plan's reference.

It shares nothing with Programs but the loss and how a loss scale follows from the last:
gradients of the sum over the global weight, clipped by their global norm, one optax
update. Parameters that do not train are arguments of the loss that it is not
differentiated by.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hexijax import compat
from hexijax.experiment import Experiment
from hexijax.layers.names import flatten, path_name, unflatten
from hexijax.plan.precision import DYNAMIC, loss_scale
from hexijax.runtime import scaling, weights
from hexijax.runtime.batches import sample_keys
from hexijax.runtime.form import BatchForm
from hexijax.runtime.intake import abstract_params, initial_params
from hexijax.runtime.results import StepResult, Sums, judged, means, numbers
from hexijax.runtime.trainable import frozen_names
from hexijax.weights.slices import MASTER, Key, Slice, whole_slice
from hexijax.weights.source import Source, Tensor, whole
from hexijax.weights.stored.manifest import Param

_TRAINED = "inner_states/True/inner_state/"
"""Where ``optax.partition`` keeps the state of what trains: an engine under a plan has
the optimizer alone."""

_with_path = jax.tree_util.tree_leaves_with_path


class PlainEngine:
    """``Engine``'s interface on one device, without plan or program.

    Args:
      experiment: what to train.
      device: where.
      form: of every batch; None: any batch is taken.
      dtype: what the device computes in; None: what the experiment asks.
    """

    program: None = None

    def __init__(
        self,
        experiment: Experiment,
        *,
        device: jax.Device,
        form: BatchForm | None = None,
        dtype: str | None = None,
    ):
        self.experiment, self.device, self._form = experiment, device, form
        loss, dtype = experiment.loss, dtype or experiment.dtype
        if hasattr(loss, "variant"):
            loss = loss.variant(dtype=dtype, per_microbatch=experiment.per_microbatch)
        self._loss = loss
        self.loss_scale = loss_scale(experiment.loss_scale, [dtype])
        """What multiplies the loss, or that it is searched for."""
        self._dynamic = self.loss_scale == DYNAMIC
        if device.platform == "cpu" and dtype == "float16":
            compat.float16_products_on_cpus()
        self._scale: jax.Array | None = None
        abstract = abstract_params(experiment)
        self._frozen = frozen_names(experiment, abstract)
        self._optimizer = experiment.optimizer
        if self._frozen:
            trains = {name: name not in self._frozen for name in flatten(abstract)}
            self._optimizer = optax.partition(
                {True: experiment.optimizer, False: optax.set_to_zero()},
                unflatten(abstract, trains),
            )
        self._step = jax.jit(self._step_function, donate_argnums=(0, 1))
        self._evaluate = jax.jit(self._sums)
        self._params: Any = None
        self._moments: Any = None
        self._came_as: Mapping[str, str] = {}

    def init(self, given: Experiment | None = None) -> None:
        """The first parameters of ``given``, or of the experiment, and fresh
        moments."""
        self.set_params(initial_params(given or self.experiment, self.device))

    def _sums(self, params: Any, batch: Mapping[str, Any], key_data: Any) -> Any:
        out = self._loss(params, batch, jax.random.wrap_key_data(key_data))
        total, weight, *rest = out
        metrics: Mapping[str, Any] = rest[0] if rest else {}
        pairs = {
            k: v if isinstance(v, tuple) else (v, weight) for k, v in metrics.items()
        }
        return jnp.sum(total), jnp.sum(weight), jax.tree.map(jnp.sum, pairs)

    def gradients(
        self,
        params: Any,
        batch: Mapping[str, Any],
        key_data: Any,
        scale: jax.Array | float = 1.0,
    ) -> Any:
        """(sum, weight, metrics), and the gradient of scale x sum / weight: zeros for
        what does not train."""
        by_name = flatten(params)
        trained = {k: x for k, x in by_name.items() if k not in self._frozen}

        def scaled(trained: Any) -> Any:
            given = unflatten(params, {**by_name, **trained})
            total, weight, metrics = self._sums(given, batch, key_data)
            # In float32: scaled, the loss of a step may be beyond float16.
            return total.astype(jnp.float32) / weight * scale, (total, weight, metrics)

        grads, sums = jax.grad(scaled, has_aux=True)(trained)
        zeros = {k: jnp.zeros_like(by_name[k]) for k in self._frozen}
        return sums, unflatten(params, {**grads, **zeros})

    def _step_function(
        self,
        params: Any,
        moments: Any,
        state: jax.Array | None,
        batch: Mapping[str, Any],
        key_data: Any,
    ) -> Any:
        experiment = self.experiment
        scale = float(self.loss_scale) if state is None else state[0]
        sums, scaled = self.gradients(params, batch, key_data, scale)
        grads = jax.tree.map(lambda g: g / scale, scaled)
        norm = optax.tree.norm(grads)
        if experiment.clip_norm is not None:
            factor = jnp.minimum(1.0, experiment.clip_norm / norm)
            grads = jax.tree.map(lambda g: g * factor, grads)
        updates, new_moments = self._optimizer.update(grads, moments, params)
        new_params = optax.apply_updates(params, updates)
        finite = jnp.isfinite(norm)
        if experiment.skip_nonfinite or self._dynamic:
            new_params, new_moments = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (new_params, new_moments),
                (params, moments),
            )
        out = (*sums, norm, finite, jnp.float32(scale))
        if state is not None:
            state = scaling.next_state(state, finite)
        return new_params, new_moments, state, out

    def _inputs(self, batch: Mapping[str, np.ndarray], step: int) -> Any:
        size = len(next(iter(batch.values())))
        keys = sample_keys(self.experiment.seed, step, size)
        return jax.device_put((dict(batch), keys), self.device)

    def step(self, batch: Mapping[str, Any], step: int) -> StepResult:
        """One optimizer step; see ``Engine.step``."""
        if self._form:
            batch = self._form.taken(batch, f"The batch of step {step}")
        self._params, self._moments, self._scale, out = self._step(
            self._params, self._moments, self._scale, *self._inputs(batch, step)
        )

        def fetch() -> dict[str, float]:
            total, weight, metrics, norm, finite, scale = jax.device_get(out)
            pairs = {"loss": (total, weight), **metrics}
            sums = {k: (float(s), float(w)) for k, (s, w) in pairs.items()}
            return numbers(sums, float(weight)) | judged(
                norm=float(norm),
                finite=float(finite),
                scale=float(scale) if self._dynamic else None,
                skips=self.experiment.skip_nonfinite or self._dynamic,
            )

        return StepResult(fetch)

    def evaluate(self, batch: Mapping[str, Any], step: int) -> dict[str, float]:
        """Loss and metrics without a gradient."""
        return means(self.sums(batch, step))

    def sums(self, batch: Mapping[str, Any], number: int) -> Sums:
        """The same before the division; see ``Engine.sums``."""
        if self._form:
            what = f"Batch {number} of the evaluation"
            batch = self._form.taken(batch, what, short=True)
        total, weight, metrics = jax.device_get(
            self._evaluate(self._params, *self._inputs(batch, number))
        )
        pairs = {"loss": (total, weight), **metrics}
        return {name: (float(s), float(w)) for name, (s, w) in pairs.items()}

    def params(self) -> Any:
        """The parameter tree, on the host."""
        return jax.device_get(self._params)

    def moments(self) -> Any:
        """The optimizer state, on the host."""
        return jax.device_get(self._moments)

    def set_params(self, params: Any) -> None:
        """Parameters from a tree of arrays or a source with the model's names, with
        fresh moments."""
        self._came_as = {}
        if isinstance(params, Source):
            params = self._read(params)
        self._params = jax.device_put(params, self.device)
        self._moments = jax.jit(self._optimizer.init)(self._params)
        if self._dynamic:
            self._scale = jax.device_put(scaling.first_state(), self.device)

    def _read(self, source: Source) -> Any:
        """The tree of a source's tensors, each put on the device as it is read."""
        abstract = abstract_params(self.experiment)
        self._came_as = weights.came_as(source, abstract)
        one = jax.sharding.SingleDeviceSharding(self.device)

        def leaf(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
            like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)
            return weights.put(source, path_name(path), whole(x.shape), like)

        return jax.tree_util.tree_map_with_path(leaf, abstract)

    def stored_params(self) -> list[Param]:
        """Where each parameter is in the model's tree."""
        return weights.stored(self._params, self._came_as)

    def slices(self) -> dict[Slice, list[jax.Array]]:
        """Parameters and moments, each whole, and a loss scale; see
        ``Engine.slices``."""
        found = dict(zip(self._slices(), self._state_leaves()[0], strict=True))
        if self._scale is not None:
            found[scaling.SLICE] = self._scale
        return {each: [array] for each, array in found.items()}

    def targets(self) -> dict[Slice, list[jax.ShapeDtypeStruct]]:
        """Shapes, dtypes and shardings of ``slices``."""
        return {
            each: [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)]
            for each, (x,) in self.slices().items()
        }

    def tensors(self) -> dict[Key, Tensor]:
        """Shape and dtype of each of ``slices``."""
        return {
            each.key: Tensor(tuple(x.shape), np.dtype(x.dtype))
            for each, (x,) in self.slices().items()
        }

    def load(self, arrays: Mapping[Slice, Sequence[jax.Array]]) -> None:
        """What ``slices`` gave, back in place."""
        _, tree = self._state_leaves()
        found = [arrays[each][0] for each in self._slices()]
        self._params, self._moments = jax.tree.unflatten(tree, found)
        if self._dynamic:
            self._scale = arrays[scaling.SLICE][0]

    def _state_leaves(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten((self._params, self._moments))

    def _slices(self) -> list[Slice]:
        """Of the parameters and the moments, in the order of their trees."""
        names = [path_name(p) for p, _ in _with_path(self._params)]
        masters = [
            whole_slice(Key(name, MASTER), tuple(x.shape))
            for name, (_, x) in zip(names, _with_path(self._params), strict=True)
        ]
        known = set(names)
        moments: list[Slice] = []
        for path, x in _with_path(self._moments):
            kind = path_name(path)
            kind = kind.removeprefix(_TRAINED) if self._frozen else kind
            parts = kind.split("/")
            ends = ("/".join(parts[at:]) for at in range(len(parts)))
            owner = next((end for end in ends if end in known), "")
            key = Key(owner, kind.removesuffix(owner).strip("/"))
            moments.append(whole_slice(key, tuple(x.shape)))
        return [*masters, *moments]

    def peak_bytes_by_device(self) -> dict[str, int]:
        """Peak bytes in use, if the backend counts them."""
        stats = self.device.memory_stats() or {}
        return {"single": stats.get("peak_bytes_in_use", 0)} if stats else {}
