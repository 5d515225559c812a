"""What an update takes at each site: on the device, streamed through it, on the host.

    Experiment, Chain, a device, site -> update -> parameters, seconds

The program is training's own, of the largest bucket that one home updates at once.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Memory, StateShare
from hexijax.program.program import Site
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.host import to_host
from hexijax.runtime.intake import abstract_params
from hexijax.runtime.layer_timing import PLACE, mesh_plan
from hexijax.runtime.layout import DEVICE, PINNED_HOST, Layout
from hexijax.runtime.links import busy
from hexijax.runtime.optimizer import GroupUpdate
from hexijax.runtime.programs import Programs
from hexijax.runtime.stopwatch import device_s, filled, median_s

_STATE = {
    Site.DEVICE: StateShare(groups=("*",), shares={}),
    Site.STREAMED: StateShare(groups=("*",), shares={}, memory=Memory.HOST),
    Site.HOST: StateShare(
        groups=("*",), shares={}, memory=Memory.HOST, update=Memory.HOST
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What else is known of a host's update beside copies."""

    alone_s: float
    """It takes while nothing is copied."""

    copies_bytes_per_s: float
    """Those copies, the slower way."""

    return_bytes_per_s: float
    """What it made, on its way to the device, beside them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTime:
    """Of one bucket."""

    params: int
    """Parameters in it."""

    seconds: float
    """Until the new ones are there in the dtype it computes in: on the device, or where
    its host has updated them."""

    beside: Beside | None = None
    """Of the host's, which runs beside copies both ways."""

    @property
    def params_per_s(self) -> float:
        """Its rate."""
        return self.params / max(self.seconds, 1e-9)


def update(
    experiment: Experiment,
    chain: Chain,
    devices: Mapping[str, jax.Device],
    name: str,
    *,
    dtype: str,
    site: Site,
) -> UpdateTime:
    """Times one bucket's update by one device, or by its host with all its cores.

    Args:
      experiment: whose optimizer.
      chain: whose parameters.
      devices: JAX's, by name.
      name: of the device.
      dtype: that it computes in.
      site: where the update runs; ``STREAMED`` counts both copies and the update, one
        after another; ``HOST`` is timed as in a step, while state passes both ways.

    Raises:
      UserError: the host is to update, and the process has no CPU backend.
    """
    plan = mesh_plan(chain, [name], dtype=dtype, samples=1, state=_STATE[site])
    layout = Layout(plan, chain, devices)
    group = max((g for g in layout.groups if g.trainable), key=lambda g: g.size)
    floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in group.leaves]
    runtime = GroupRuntime(
        layout=layout,
        programs=Programs(),
        update=GroupUpdate.of(
            experiment.optimizer, abstract_params(experiment), frozen=chain.frozen
        ),
        group=group,
        members=(PLACE,),
        param_dtypes={
            PLACE: [
                dtype if f else leaf.dtype
                for f, leaf in zip(floats, group.leaves, strict=True)
            ]
        },
        unscale=1.0,
        guarded=False,
    )
    computed = runtime.computed_structs(PLACE)
    grads = filled(
        tuple(
            jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)
            for x in computed["master"]
        )
    )
    # Moments of squares are not below zero.
    state = jax.tree.map(abs, filled(computed))
    device = devices[name]
    if site is Site.DEVICE:
        seconds = device_s(_on_device(runtime, state, grads), device)
    elif site is Site.STREAMED:
        seconds = median_s(_streamed(runtime, state, grads), 3)
    else:
        call, back = _on_host(runtime, state, grads)
        alone_s = median_s(call, 3)
        with busy(device) as copies:
            seconds = median_s(call, 5)
        with busy(device):
            back_s = median_s(back, 5)
        made_bytes = sum(x.nbytes for x in jax.tree.leaves(back()))
        beside = Beside(
            alone_s=alone_s,
            copies_bytes_per_s=copies.bytes_per_s,
            return_bytes_per_s=made_bytes / max(back_s, 1e-9),
        )
        return UpdateTime(params=group.size, seconds=seconds, beside=beside)
    return UpdateTime(params=group.size, seconds=seconds)


def _on_device(runtime: GroupRuntime, state: Any, grads: Any) -> Callable[[], Any]:
    held = [state]

    def call() -> Any:
        held[0], slices = runtime.update(PLACE, held[0], grads, None)
        return held[0], slices

    return call


def _streamed(runtime: GroupRuntime, state: Any, grads: Any) -> Callable[[], Any]:
    rest = runtime.closed(PLACE, state)
    here = jax.tree.map(lambda x: x.sharding.with_memory_kind(DEVICE), rest)
    rests = jax.tree.map(lambda s: s.with_memory_kind(PINNED_HOST), here)
    held = [jax.block_until_ready(jax.device_put(rest, rests))]

    def call() -> Any:
        come = jax.device_put(held[0], here)
        new, slices = runtime.update(PLACE, come, grads, None)
        held[0] = jax.device_put(new, rests)
        return held[0], slices

    return call


def _on_host(
    runtime: GroupRuntime, state: Any, grads: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The update, and the way of what it made to the device."""
    leaves, tree = jax.tree.flatten(state)
    held = [jax.tree.unflatten(tree, to_host(leaves))]
    pinned = jax.tree.map(lambda x: x.sharding.with_memory_kind(PINNED_HOST), grads)
    left = jax.block_until_ready(jax.device_put(grads, pinned))

    made: list[Any] = [None]

    def call() -> Any:
        held[0], made[0] = runtime.update_on_host(
            PLACE, held[0], left, None, travels=True
        )
        return made[0]

    return call, lambda: runtime.on_devices(PLACE, made[0])
