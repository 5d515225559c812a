"""Times of a model's layers on one mesh: the runs of alike layers, alone.

    Experiment, Chain, devices, samples, remat -> layer_rows -> rows of `layer_times`

The programs are those of training, compiled by the same compiler, of runs of at most
four layers: a model that is too large for a card is measured there all the same. One
program of the last run and the loss, forward and backward, tells what programs of their
own cost more than one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.cluster import Cluster
from hexijax.costs.compute import fused_attention
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain, Remat
from hexijax.layers.segment import KEYS, MASK
from hexijax.plan.plan import Plan, Replica, Stage, StateShare, stage_place
from hexijax.program.buckets import segment_buckets
from hexijax.runtime.compiled import program_bytes
from hexijax.runtime.intake import abstract_params
from hexijax.runtime.layout import Layout
from hexijax.runtime.lowering import Compiled, Given, Work
from hexijax.runtime.segments import Compiler
from hexijax.runtime.stopwatch import device_s, filled, waiting_s
from hexijax.runtime.tracing import attention_on, traced_as

MOST_LAYERS = 4
"""Of a run that is one program: its call is then a small part of what is timed."""

PLACE = stage_place(0, 0)

FORWARD_SHARE = 1 / 3
"""Of a program of forward and backward that cannot be had apart: two products to one.
"""

LEAST_JOINED = 0.5
"""Less of their sum than this is no saving of one program over two, but noise."""

Row = dict[str, Any]


def runs(chain: Chain, most: int = MOST_LAYERS) -> tuple[int, ...]:
    """Layers of each run of alike ones, none longer than ``most`` and those of a
    stretch of equal length; the last layer, which ends in the loss, is one of its
    own."""
    found: list[int] = []
    stretch: list[int] = []
    before = None
    for layer in chain.layers[:-1]:
        if layer.signature == before:
            stretch[-1] += 1
        else:
            stretch.append(1)
        before = layer.signature
    for count in stretch:
        each = max(n for n in range(1, most + 1) if count % n == 0)
        found += [each] * (count // each)
    return (*found, 1)


def mesh_plan(
    chain: Chain,
    names: Sequence[str],
    *,
    dtype: str,
    samples: int,
    remat: Remat = Remat.NONE,
    state: StateShare | None = None,
) -> Plan:
    """One microbatch of all layers on one mesh, cut into ``runs``."""
    stage = Stage(
        devices=tuple(names),
        layers=(0, len(chain.layers)),
        tensor=len(names),
        dtype=dtype,
        segments=runs(chain),
        remat=(remat,) * len(chain.layers),
    )
    replica = Replica(
        stages=(stage,), microbatches=1, microbatch_size=samples, samples=samples
    )
    plan = Plan(replicas=(replica,), batch_size=samples, chain=chain.fingerprint())
    return plan if state is None else dataclasses.replace(plan, state=(state,))


def layer_rows(
    experiment: Experiment,
    chain: Chain,
    cluster: Cluster,
    devices: Mapping[str, jax.Device],
    names: Sequence[str],
    *,
    dtype: str,
    samples: int,
    remat: Remat = Remat.NONE,
) -> list[Row]:
    """One row for each layer that is unlike, of a kind's ``layer_times``.

    Args:
      experiment: whose model.
      chain: its layers.
      cluster: what the devices are.
      devices: JAX's, by name.
      names: of the mesh; their number is the tensor degree.
      dtype: compute dtype.
      samples: of a microbatch.
      remat: what layers compute again.

    Raises:
      jax.errors.JaxRuntimeError: the device has too little memory.
    """
    timer = _Timer(
        experiment, chain, cluster, devices, names, dtype, samples, remat=remat
    )
    profile = cluster.device(names[0]).profile
    layers = chain.layers_under(fused_attention=fused_attention(profile, dtype))
    cut = runs(chain)
    starts = [sum(cut[:i]) for i in range(len(cut))]
    last = starts[-1]
    spans: dict[str, tuple[int, int]] = {}
    for start, count in zip(starts[:-1], cut[:-1], strict=True):
        spans.setdefault(layers[start].signature, (start, start + count))
    work = [
        layers[start].forward_flops * n for start, n in zip(starts, cut, strict=True)
    ]
    large = [i for i, flops in enumerate(work[:-1]) if flops >= max(work[:-1]) / 2]
    joined = [(last, last + 1), *((starts[i], last + 1) for i in large[-1:])]
    timer.compile(apart=list(spans.values()), joined=joined)
    times = {
        signature: timer.apart(span).of_each(span[1] - span[0])
        for signature, span in spans.items()
    }
    head = timer.joined(joined[0])
    share = 1.0
    if large:
        runs_s = (
            times[layers[start].signature].total_s * count
            for start, count in zip(
                starts[large[-1] : -1], cut[large[-1] : -1], strict=True
            )
        )
        one_s = timer.joined(joined[1]).total_s - head.total_s
        share = min(1.0, max(LEAST_JOINED, one_s / (sum(runs_s) or 1.0)))

    def row(signature: str, joined: Times, apart: Times) -> Row:
        return {
            "signature": signature,
            "dtype": dtype,
            "tensor": len(names),
            "samples": samples,
            "remat": remat.value,
            "forward_s": joined.forward_s,
            "backward_s": joined.backward_s,
            "apart_forward_s": apart.forward_s,
            "apart_backward_s": apart.backward_s,
            "residual_bytes": apart.residual_bytes,
            "temp_bytes": apart.temp_bytes,
        }

    return [
        *(row(signature, each.times(share), each) for signature, each in times.items()),
        row(layers[last].signature, head, head),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """What programs of some layers take."""

    forward_s: float
    """Of one microbatch."""

    backward_s: float
    """With what is computed again."""

    residual_bytes: int
    """That the forward keeps for the backward, on a device."""

    temp_bytes: int
    """The most that a program has alive within."""

    @property
    def total_s(self) -> float:
        """Both ways."""
        return self.forward_s + self.backward_s

    def times(self, share: float) -> "Times":
        """The same in so much of the time."""
        return dataclasses.replace(
            self, forward_s=self.forward_s * share, backward_s=self.backward_s * share
        )

    def of_each(self, count: int) -> "Times":
        """A layer's part of those of ``count`` alike; what is alive within stays."""
        each = self.times(1 / count)
        return dataclasses.replace(each, residual_bytes=self.residual_bytes // count)


class _Timer:
    """One mesh's programs, each run with arrays made for it and forgotten after."""

    def __init__(
        self,
        experiment: Experiment,
        chain: Chain,
        cluster: Cluster,
        devices: Mapping[str, jax.Device],
        names: Sequence[str],
        dtype: str,
        samples: int,
        *,
        remat: Remat,
    ):
        self._chain, self._remat = chain, remat
        self._device = devices[names[0]]
        plan = mesh_plan(chain, names, dtype=dtype, samples=samples, remat=remat)
        self._layout = Layout(plan, chain, devices)
        profile = cluster.device(names[0]).profile
        self._traced = traced_as(
            experiment,
            abstract_params(experiment),
            chain,
            dtype=dtype,
            attention=attention_on(self._device, profile, dtype),
            size=samples,
            padded=False,
        )
        self._compiler = Compiler(self._layout)
        self._made: Mapping[Any, Compiled] = {}
        self._asking_s = waiting_s(self._device)

    def compile(
        self, *, apart: Sequence[tuple[int, int]], joined: Sequence[tuple[int, int]]
    ) -> None:
        """Programs of runs [start, stop): forward and backward apart, and as one."""
        for spans, work in ((apart, Work.TRAIN), (joined, Work.FUSED)):
            for span in spans:
                segment = self._traced.segment(
                    *span,
                    (self._remat,) * (span[1] - span[0]),
                    segment_buckets(self._layout.groups, span),
                )
                wanted = work if segment.has_backward else Work.EVALUATE
                self._compiler.add(
                    (span, work), PLACE, segment, segment.param_dtypes, wanted
                )
        self._made = self._compiler.compile()

    def apart(self, span: tuple[int, int]) -> Times:
        """Seconds of a run's forward and backward, and what they take."""
        made = self._made[span, Work.TRAIN]
        given, inputs = self._inputs((span, Work.TRAIN))
        if made.forward is None:
            return self._forward_only(made, inputs)
        forward_s = self._timed(_call(made.forward, *inputs))
        _, residuals = made.forward(*inputs)
        cot = filled(given.cot)
        grads = [filled(given.grads)]
        run = made.backward
        assert run is not None, span

        def backward() -> Any:
            grads[0], d_act = run(*inputs, residuals, cot, grads[0])
            return grads[0], d_act

        backward_s = self._timed(backward)
        return Times(
            forward_s=forward_s,
            backward_s=backward_s,
            residual_bytes=sum(x.addressable_shards[0].data.nbytes for x in residuals),
            temp_bytes=max(p.temp_bytes for p in program_bytes(made).values()),
        )

    def joined(self, span: tuple[int, int]) -> Times:
        """The same of a last run whose forward and backward are one."""
        made = self._made[span, Work.FUSED]
        given, inputs = self._inputs((span, Work.FUSED))
        run = made.fused
        if run is None:
            return self._forward_only(made, inputs)
        cot, grads = filled(given.cot), [filled(given.grads)]

        def both() -> Any:
            out, grads[0], d_act = run(*inputs, cot, grads[0])
            return out, grads[0], d_act

        both_s = self._timed(both)
        return Times(
            forward_s=both_s * FORWARD_SHARE,
            backward_s=both_s * (1 - FORWARD_SHARE),
            residual_bytes=0,
            temp_bytes=program_bytes(made)["fused"].temp_bytes,
        )

    def _forward_only(self, made: Compiled, inputs: tuple[Any, ...]) -> Times:
        """Of a run with nothing to differentiate."""
        seconds = self._timed(_call(made.evaluate, *inputs))
        return Times(forward_s=seconds, backward_s=0.0, residual_bytes=0, temp_bytes=0)

    def _inputs(self, name: Any) -> tuple[Given, tuple[Any, ...]]:
        """What a run is handed."""
        given = self._compiler.given(name)
        batch = {k: self._batch_array(k, s) for k, s in given.batch.items()}
        made = filled((given.params, given.act)), batch, filled(given.consts)
        (params, act), batch, consts = made
        return given, (params, act, batch, consts)

    def _batch_array(self, name: str, struct: Any) -> jax.Array:
        """Weights are one; numbers that pick rows pick all over them."""
        shape, dtype = tuple(struct.shape), struct.dtype
        known = self._chain.batch.get(name)
        if name == MASK:
            return jax.jit(
                lambda: jnp.ones(shape, dtype), out_shardings=struct.sharding
            )()
        if name == KEYS or known is None or not known.rows:
            return filled(struct)
        rows = known.rows

        def picks() -> jax.Array:
            index = jnp.arange(struct.size, dtype=jnp.uint32) * jnp.uint32(
                2_654_435_761
            )
            return (index % jnp.uint32(rows)).astype(dtype).reshape(shape)

        return jax.jit(picks, out_shardings=struct.sharding)()

    def _timed(self, call: Callable[[], Any]) -> float:
        return device_s(call, self._device, self._asking_s)


def _call(program: Any, *inputs: Any) -> Callable[[], Any]:
    return lambda: program(*inputs)
