"""A plan at work: traced, compiled, and stepped.

    Experiment + Plan + devices -> trace per stage -> compile -> Executor -> step(batch)

The engine owns what a step needs besides the Program: the sample map, the global
weight, the random keys, and the numbers people read.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hexijax.cluster import Cluster
from hexijax.costs import PlanCosts
from hexijax.costs.temp import Temps
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain
from hexijax.layers.segment import Segment
from hexijax.layers.trace import TracedModel
from hexijax.plan.checks import check_whole
from hexijax.plan.plan import Place, Plan, stage_place
from hexijax.plan.precision import DYNAMIC, loss_scale
from hexijax.program import names
from hexijax.program.buckets import segment_buckets
from hexijax.program.fuse import fused_segments
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import (
    Backward,
    Buffer,
    Kind,
    Part,
    Program,
    Recv,
    Send,
)
from hexijax.runtime import devices as machine
from hexijax.runtime.actions import Parts
from hexijax.runtime.borders import Border
from hexijax.runtime.carrying import ONE_PROCESS, Carrier
from hexijax.runtime.compiled import compiled_temps
from hexijax.runtime.executor import Executor, Watch
from hexijax.runtime.feed import Feed
from hexijax.runtime.form import BatchForm
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.homes import Homes
from hexijax.runtime.intake import abstract_params
from hexijax.runtime.layout import Layout
from hexijax.runtime.losses import Losses
from hexijax.runtime.lowering import Work
from hexijax.runtime.memo import MADE_BY, memo
from hexijax.runtime.optimizer import GroupUpdate
from hexijax.runtime.programs import Programs
from hexijax.runtime.reach import OptimizerError, Reach, classify
from hexijax.runtime.results import (
    StepResult,
    Sums,
    judged,
    means,
    numbers,
    totals,
)
from hexijax.runtime.segments import (
    Compiled,
    Compiler,
    Progress,
    zeros,
)
from hexijax.runtime.tracing import attention_on, traced_as
from hexijax.runtime.trainable import frozen_names
from hexijax.runtime.verdicts import Verdicts


class Engine(Homes):
    """Trains one experiment under one plan.

    Args:
      experiment: what to train.
      plan: who does what; checked against chain and cluster by the caller.
      chain: the layers the plan's numbers refer to.
      cluster: kinds of the devices, which decide compute dtype and attention.
      devices: cluster device name -> JAX device of this process.
      progress: told (what, done, total) while compiling.
      carrier: what takes arrays from device to device, and which devices are here; the
        engines of all islands must then be told to do the same in the same order.
    """

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        chain: Chain,
        cluster: Cluster,
        devices: Mapping[str, jax.Device],
        *,
        progress: Progress | None = None,
        carrier: Carrier = ONE_PROCESS,
    ):
        self.experiment, self.plan, self.chain = experiment, plan, chain
        self.cluster, self.devices = cluster, dict(devices)
        if experiment.per_microbatch:
            check_whole(plan)
        self._abstract = abstract_params(experiment)
        _check_frozen(frozen_names(experiment, self._abstract), chain)
        reach = classify(experiment.optimizer, self._abstract, frozen=chain.frozen)
        _refuse_cut_stacks(reach, chain)
        self.layout = Layout(
            plan,
            chain,
            self.devices,
            whole_leaves=reach is Reach.PER_LEAF,
            carrier=carrier,
        )
        self.loss_scale = loss_scale(
            experiment.loss_scale, [stage.dtype for _, stage in plan.stages()]
        )
        """What multiplies the loss, or that it is searched for."""
        self._rules = StepRules(
            clip=experiment.clip_norm is not None,
            skip_nonfinite=experiment.skip_nonfinite,
            dynamic_scale=self.loss_scale == DYNAMIC,
        )
        whole_leaves = self.layout.whole_leaves
        self.program: Program = lower(
            plan,
            chain,
            rules=self._rules,
            costs=PlanCosts(plan, chain, cluster, whole_leaves=whole_leaves),
            whole_leaves=whole_leaves,
        )
        trained = next(group for group in self.layout.groups if group.trainable)
        self._verdicts = Verdicts(
            self.layout,
            next(iter(self.layout.boxes[trained.name])),
            loss_scale=self.loss_scale,
            clip_norm=experiment.clip_norm,
        )
        self._form = BatchForm(size=plan.batch_size, arrays=chain.batch)
        self._pads_all = False
        self._programs = Programs(carrier)
        self._segments = self._cut()
        self._losses = self._make_losses()
        self._feed = self._make_feed()
        self.groups = self._make_groups()
        compiler = Compiler(self.layout, progress)
        self._add(compiler, self.program, grad=True)
        parts = self._parts(self.program, compiler)
        self.segments: Mapping[tuple[Place, int], Compiled] = parts.segments
        self._executor = Executor(self.program, parts)
        self._evaluator: Executor | None = None
        self._came_as: Mapping[str, str] = {}
        self._seeds: dict[Place, jax.Array] = {}
        self._asked = 0
        """How often the state of all islands was asked for."""
        # Nothing runs on the devices till then: XLA times kernels there, to choose.
        compiler.wait()

    # Building.

    def _cut(self) -> dict[tuple[Place, int], Segment]:
        return {
            (place, i): self._traced(place).segment(
                *stage.segment_layers(i),
                _remat(stage, i),
                segment_buckets(self.layout.groups, stage.segment_layers(i)),
            )
            for place, stage in self.plan.stages()
            for i in range(len(stage.segments))
        }

    def _make_feed(self) -> Feed:
        seed = self.experiment.seed
        return Feed(self.layout, self._segments, self._traced, seed)

    def _make_losses(self) -> Losses:
        names = {n for s in self._segments.values() for n in s.scalar_names}
        return Losses(self.layout, self._programs, sorted(names))

    @memo
    def _trace(
        self, dtype: str, attention: str, size: int, padded: bool
    ) -> TracedModel:
        return traced_as(
            self.experiment,
            self._abstract,
            self.chain,
            dtype=dtype,
            attention=attention,
            size=size,
            padded=padded,
        )

    def _traced(self, place: Place) -> TracedModel:
        """The model as the stage at ``place`` computes it: one lane's microbatch."""
        stage = self.plan.stage(place)
        replica = self.plan.replicas[int(place[1:].split(".")[0])]
        device = self.devices[stage.devices[0]]
        profile = self.cluster.device(stage.devices[0]).profile
        attention = attention_on(device, profile, stage.dtype)
        room = replica.microbatches * replica.microbatch_size
        padded = self._pads_all or replica.samples < room
        size = replica.microbatch_size // stage.lanes
        return self._trace(stage.dtype, attention, size, padded)

    def _param_dtypes(self, place: Place) -> dict[str, str]:
        """Dtype of each leaf on a stage: that of its first use, if segments agree."""
        seen: dict[str, set[str]] = {}
        for (at, _), segment in self._segments.items():
            if at == place:
                for leaf, dtype in zip(
                    segment.leaves, segment.param_dtypes, strict=True
                ):
                    seen.setdefault(leaf.id, set()).add(dtype)
        return {
            leaf: next(iter(dtypes))
            if len(dtypes) == 1
            else self.layout.leaf[leaf].dtype
            for leaf, dtypes in seen.items()
        }

    def _make_groups(self) -> dict[str, GroupRuntime]:
        members: dict[str, list[Place]] = {g.name: [] for g in self.layout.groups}
        for (place, _), segment in self._segments.items():
            for name in segment.groups:
                if place not in members[name]:
                    members[name].append(place)
        update = GroupUpdate.of(
            self.experiment.optimizer, self._abstract, frozen=self.chain.frozen
        )
        dtypes = {place: self._param_dtypes(place) for place, _ in self.plan.stages()}
        return {
            group.name: GroupRuntime(
                layout=self.layout,
                programs=self._programs,
                update=update,
                group=group,
                members=tuple(members[group.name]),
                param_dtypes={
                    place: [dtypes[place][leaf.id] for leaf in group.leaves]
                    for place in members[group.name]
                },
                unscale=1.0 / self._verdicts.fixed_scale,
                guarded=self._rules.skips,
            )
            for group in self.layout.groups
        }

    def _add(self, compiler: Compiler, program: Program, *, grad: bool) -> None:
        fused = fused_segments(program)
        split = {
            (i.place, i.segment)
            for i in program.body
            if isinstance(i, Backward) and i.part is not Part.BOTH
        }
        kinds = {
            (False, False): Work.TRAIN,
            (False, True): Work.SPLIT,
            (True, False): Work.FUSED,
            (True, True): Work.FUSED_SPLIT,
        }
        for (place, i), segment in self._segments.items():
            if not self.layout.here(place):
                continue
            dtypes = self._param_dtypes(place)
            ids = [dtypes[leaf.id] for leaf in segment.leaves]
            work = kinds[(place, i) in fused, (place, i) in split]
            work = work if grad and segment.has_backward else Work.EVALUATE
            compiler.add((place, i), place, segment, ids, work)

    def _parts(self, program: Program, compiler: Compiler) -> Parts:
        return Parts(
            segments=compiler.begin(),
            groups=self.groups,
            borders=self._borders(program),
            zeros=self._zeros,
            load=self._feed.load,
            consts=self._consts,
            seed=lambda place: self._seeds[place],
            judge=self._verdicts.judge,
            rescale=self._verdicts.rescale,
            collect=self._losses.collect,
            layout=self.layout,
        )

    def _borders(self, program: Program) -> dict[Any, Border]:
        borders: dict[Any, Border] = {}
        for instruction in program:
            if not isinstance(instruction, Send | Recv):
                continue
            buffers = [r.buffer for r in instruction.reads] + list(instruction.writes)
            (end,) = (b for b in buffers if b.kind is not Kind.WIRE)
            source, target = instruction.source, instruction.target
            key = (source, target, end.subject, end.kind)
            if key in borders:
                continue
            layer = int(end.subject.removeprefix("L"))
            cotangent = end.kind is Kind.COT
            borders[key] = Border(
                layout=self.layout,
                programs=self._programs,
                source=source,
                target=target,
                given=self._border_arrays(source, layer, floats=cotangent),
                wanted=self._border_arrays(target, layer, floats=cotangent),
                cotangent=cotangent,
            )
        return borders

    def _border_arrays(
        self, place: Place, layer: int, *, floats: bool
    ) -> Sequence[jax.ShapeDtypeStruct]:
        stage = self.plan.stage(place)
        ends_here = layer == stage.layers[1]
        segment = self._segments[place, len(stage.segments) - 1 if ends_here else 0]
        arrays = segment.border_out if ends_here else segment.border_in
        which = segment.float_out if ends_here else segment.float_in
        return [arrays[i] for i in which] if floats else list(arrays)

    @memo
    def _zeros(self, place: Place, groups: tuple[str, ...]) -> Callable[[], Any]:
        leaves = [x for name in groups for x in self.groups[name].group.leaves]
        return zeros(self.layout, place, leaves)

    @memo
    def _consts(self, place: Place) -> dict[str, jax.Array]:
        return jax.device_put(
            dict(self._traced(place).consts), self.layout.replicated(place)
        )

    def temps(self) -> Temps:
        """What the compiled segments have alive within, for later promises."""
        return compiled_temps(self.plan, self.chain, self.cluster, self.segments)

    # Stepping.

    def step(self, batch: Mapping[str, Any], step: int) -> StepResult:
        """One optimizer step on a global batch; returns before it is computed.

        Args:
          batch: arrays by name, ``[batch_size, ...]``.
          step: number of the step; random keys follow from it.

        Raises:
          UserError: the batch has another form, or no weight; nothing was dispatched.
        """
        what = f"The batch of step {step}"
        weight = self._feed.begin(self._form.taken(batch, what), step)
        if not weight:
            raise UserError(
                f"{what} has weight 0: there is nothing to average over. Look at the "
                "weights that the loss returns."
            )
        for r, replica in enumerate(self.plan.replicas):
            last = stage_place(r, len(replica.stages) - 1)
            if not self.layout.here(last):
                continue
            seed = jax.device_put(
                np.float32(self._seed(r, weight)), self.layout.replicated(last)
            )
            if self._rules.dynamic_scale:
                state = self._executor.get(names.scale(last))
                seed = self._verdicts.scaled(last)(state, seed)
            self._seeds[last] = seed
        left = self._executor.run_body()
        return StepResult(functools.partial(self._fetch, left, weight), left)

    def watched_step(
        self, batch: Mapping[str, Any], step: int, then: Watch
    ) -> StepResult:
        """A step that calls ``then`` after each instruction has been dispatched."""
        with self._executor.watched(then):
            return self.step(batch, step)

    def evaluate(self, batch: Mapping[str, Any], step: int) -> dict[str, float]:
        """Loss and metrics of a global batch, without a gradient."""
        return means(self.sums(batch, step))

    def sums(self, batch: Mapping[str, Any], number: int) -> Sums:
        """The same before the division, for a mean over many batches.

        Args:
          batch: arrays by name, as a step's, or of fewer samples.
          number: random keys follow from it, where the loss draws.

        Raises:
          UserError: the batch has another form.
        """
        taken = self._form.taken(batch, f"Batch {number} of the evaluation", short=True)
        size = len(next(iter(taken.values())))
        engine = self if size == self.plan.batch_size else self._for_short(size)
        return engine._sums(taken, number)

    def _for_short(self, size: int) -> "Engine":
        """The engine that evaluates batches of ``size`` samples: this one where the
        loss gives numbers by sample, which padding can be left out of; else its twin,
        with the same parameters, that takes the loss a sample at a time."""
        if self.experiment.per_microbatch:
            raise UserError(
                f"A batch of {size} samples was to be evaluated, and the batch size is "
                f"{self.plan.batch_size}: under per_microbatch=True the loss depends "
                "on the samples that stand together, so none can be padding. Leave the "
                "short batch out, or fill it up."
            )
        maskable = all(self._traced(p).maskable for p, _ in self.plan.stages())
        return self if maskable else self._twin()

    @memo
    def _twin(self) -> "Engine":
        twin = copy.copy(self)
        for name in [name for name in twin.__dict__ if name.startswith(MADE_BY)]:
            del twin.__dict__[name]
        twin._pads_all, twin._evaluator = True, None
        twin._segments = twin._cut()
        twin._losses = twin._make_losses()
        twin._feed = twin._make_feed()
        return twin

    def _sums(self, batch: Mapping[str, np.ndarray], number: int) -> Sums:
        if self._evaluator is None:
            program = lower(
                self.plan,
                self.chain,
                rules=self._rules,
                evaluation=True,
                whole_leaves=self.layout.whole_leaves,
            )
            compiler = Compiler(self.layout)
            self._add(compiler, program, grad=False)
            name = "short batch" if self._pads_all else "evaluation"
            self._evaluator = Executor(program, self._parts(program, compiler), name)
            compiler.wait()
        weight = self._feed.begin(batch, number)
        for buffer in self._evaluator.given:
            self._evaluator.put(buffer, self._executor.get(buffer))
        left = self._evaluator.run_body()
        for buffer in self._evaluator.given:  # or they would outlive the next update
            self._evaluator.put(buffer, None)
        return self._totals(left, weight)

    def _seed(self, replica: int, weight: float) -> float:
        """What a replica's loss sums are multiplied by in the backward, but for a
        dynamic scale.

        The same for all: the weight is that of the whole batch, never a replica's own.
        """
        return self._verdicts.fixed_scale / weight

    def _totals(self, left: Mapping[Any, Any], weight: float) -> Sums:
        by_name = {b.subject: value for b, value in left.items()}
        return totals(self._losses.read(by_name["loss"]), weight)

    def _fetch(self, left: Mapping[Any, Any], weight: float) -> dict[str, float]:
        by_name = {b.subject: value for b, value in left.items()}
        found = numbers(self._totals(left, weight), weight)
        if "norm" not in by_name:
            return found
        verdict = self.layout.carrier.settle(by_name["norm"])
        norm, _, finite, scale = map(float, jax.device_get(verdict))
        return found | judged(
            norm=norm,
            finite=finite,
            scale=scale if self._rules.dynamic_scale else None,
            skips=self._rules.skips,
        )

    # Figures.

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one step, without recomputation."""
        a_sample = sum(x.forward_flops + x.backward_flops for x in self.chain.layers)
        return a_sample * self.plan.batch_size

    def peak_bytes_by_device(self) -> dict[str, int]:
        """Peak bytes in use by device name; empty where the backend does not count."""
        return machine.peak_bytes(self.devices)

    def live_buffers(self) -> list[Buffer]:
        """Buffers that hold something between steps: state and parameters."""
        return self._executor.live()


def _check_frozen(frozen: frozenset[str], chain: Chain) -> None:
    """The chain was traced for the parameters that the experiment trains."""
    unlike = sorted(frozen ^ chain.frozen)
    if unlike:
        does, traced = ("does not train", "trains")
        if unlike[0] in chain.frozen:
            does, traced = traced, does
        raise UserError(
            f"The experiment {does} {unlike[0]!r}, and the chain {chain.name} was "
            f"traced as one that {traced} it ({len(unlike)} parameters differ). Trace "
            "the experiment's own chain: hexijax.job.intake.trace_chain."
        )


def _refuse_cut_stacks(reach: Reach, chain: Chain) -> None:
    """An optimizer that looks inside a leaf would look at a layer's row of a stack."""
    trained = (leaf for leaf in chain.leaves() if leaf.trainable)
    rows = [leaf.id for leaf in trained if leaf.row is not None]
    if reach is Reach.PER_LEAF and rows:
        raise OptimizerError(
            f"The optimizer looks inside whole leaves, and {rows[0]!r} is one layer's "
            "row of a leaf stacked over layers: its update alone is not the whole "
            "leaf's. Use an element-wise optimizer such as AdamW, or a model whose "
            "layers are not stacked (scanned)."
        )


def _remat(stage: Any, segment: int) -> tuple[Any, ...]:
    start, stop = stage.segment_layers(segment)
    base = stage.layers[0]
    return tuple(stage.remat[start - base : stop - base])
