"""A plan at work beside the plain program, and what must be equal.

Models, their traces, first parameters and reference gradients are shared by all plans:
what a plan adds is its own engine.
"""

import dataclasses
import functools
import random
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from experiments.bench_mixed import remembering
from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain
from hexijax.layers.names import flatten
from hexijax.layers.trace import TracedModel, trace_model
from hexijax.plan.plan import Plan, Schedule
from hexijax.program import names
from hexijax.runtime import tracing
from hexijax.runtime.batches import sample_keys
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from hexijax.runtime.plain import PlainEngine
from tests.laws.drawing import draw_plan
from tests.laws.law_models import Shape, tokens

BATCH_SIZE = 12
CLIP_NORM = 0.05
SEED = 3

FACTORS = (
    "cut",
    "tensor",
    "lanes",
    "unequal",
    "tied",
    "scanned",
    "api",
    "clipped",
    "schedule",
)


INNER = optax.adamw(1e-2)
OPTIMIZER = remembering(INNER)


@functools.cache
def cluster() -> Cluster:
    """Eight devices of two kinds."""
    return Cluster.from_toml("experiments/clusters/quickstart.toml")


@functools.cache
def model(shape: Shape) -> tuple[Any, Any]:
    """The loss as a plain function, and its first parameters."""
    loss = shape.loss()

    def plain_loss(params: Any, batch: Any, keys: Any) -> Any:
        return loss(params, batch, keys)

    return plain_loss, jax.tree.map(np.asarray, loss.init(jax.random.key(SEED)))


@functools.cache
def _traced(loss: Any, size: int, padded: bool, frozen: frozenset[str]) -> TracedModel:
    shape = next(s for s in _shapes_seen if model(s)[0] is loss)
    return trace_model(
        loss,
        model(shape)[1],
        tokens(size),
        microbatch_size=size,
        padded=padded,
        frozen=frozen,
    )


_shapes_seen: list[Shape] = []


@functools.cache
def chain(shape: Shape) -> Chain:
    """The model's layers."""
    _shapes_seen.append(shape)
    frozen = frozenset(n for n in flatten(model(shape)[1]) if not shape.trains(n))
    return _traced(model(shape)[0], 2, False, frozen).chain


def _shared_trace(loss: Any, params: Any, batch: Any, **options: Any) -> TracedModel:
    size, padded = options["microbatch_size"], options["padded"]
    return _traced(loss, size, padded, options["frozen"])


@functools.cache
def experiment(shape: Shape, clipped: bool) -> Experiment:
    """The model as an experiment."""
    loss, params = model(shape)
    return Experiment(
        loss=loss,
        init=lambda key: params,
        optimizer=OPTIMIZER,
        batch_size=BATCH_SIZE,
        seed=SEED,
        clip_norm=CLIP_NORM if clipped else None,
        trainable=shape.trains,
    )


@functools.cache
def plain(shape: Shape) -> Any:
    """(params, batch, key data) -> (sums, gradients) of the plain program."""
    reference = PlainEngine(experiment(shape, False), device=jax.devices()[0])
    return jax.jit(reference.gradients)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a plan for it."""

    seed: int
    shape: Shape
    clipped: bool
    plan: Plan

    @property
    def factors(self) -> dict[str, Any]:
        """What this case is an example of."""
        replicas = self.plan.replicas
        cuts = {tuple(s.layers for s in r.stages) for r in replicas}
        stages = [s for r in replicas for s in r.stages]
        rooms = [r.microbatches * r.microbatch_size for r in replicas]
        unequal = len({(r.microbatches, r.microbatch_size) for r in replicas}) > 1
        padded = any(room > r.samples for room, r in zip(rooms, replicas, strict=True))
        return {
            "cut": "unlike" if len(cuts) > 1 else "alike",
            "tensor": max(s.tensor for s in stages) > 1,
            "lanes": max(s.lanes for s in stages) > 1,
            "unequal": unequal or padded,
            "tied": self.shape.tied,
            "scanned": self.shape.scanned,
            "api": self.shape.api,
            "clipped": self.clipped,
            "schedule": self._schedule.value,
        }

    @property
    def _schedule(self) -> Schedule:
        """What runs, whatever the plan calls it: a single stage splits no backward, and
        one or two microbatches are never further ahead than in 1F1B."""
        pipelines = [r for r in self.plan.replicas if len(r.stages) > 1]
        if self.plan.schedule is Schedule.ZERO_BUBBLE and not pipelines:
            return Schedule.ONE_F_ONE_B
        ahead = any(r.microbatches > 2 for r in pipelines)
        if self.plan.schedule is Schedule.EAGER and not ahead:
            return Schedule.ONE_F_ONE_B
        return self.plan.schedule

    @property
    def cost(self) -> int:
        """Segments to compile."""
        return sum(len(s.segments) for r in self.plan.replicas for s in r.stages)


@functools.cache
def draw(seed: int, schedule: Schedule | None = None) -> Case:
    """A random case; the same one for the same seed."""
    rng = random.Random(seed)
    shape = Shape(
        api=rng.choice(["nnx", "linen"]),
        tied=rng.random() < 0.5,
        scanned=rng.random() < 0.5,
    )
    clipped = rng.random() < 0.5
    plan = draw_plan(rng, chain(shape), batch_size=BATCH_SIZE, schedule=schedule)
    return Case(seed, shape, clipped, plan)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a plan's first step gave, and the plain program on the same batch."""

    engine: Engine
    result: dict[str, float]
    grads: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    want_result: dict[str, float]
    want_grads: dict[str, np.ndarray]


def reference(shape: Shape, clipped: bool, params: Any, batch: Any, step: int) -> Any:
    """(numbers, gradients) of the plain program."""
    keys = sample_keys(SEED, step, BATCH_SIZE)
    (total, weight, metrics), grads = plain(shape)(params, batch, keys)
    grads = {k: np.asarray(g) for k, g in flatten(grads).items()}
    norm = global_norm(grads)
    factor = min(1.0, CLIP_NORM / norm) if clipped else 1.0
    means = {k: float(s) / float(w) for k, (s, w) in metrics.items()}
    numbers = {"loss": float(total) / float(weight), "grad_norm": norm, **means}
    return numbers, {k: g * np.float32(factor) for k, g in grads.items()}


def global_norm(grads: dict[str, np.ndarray]) -> float:
    """Norm of all gradients together."""
    return float(
        np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads.values()))
    )


def run(case: Case, monkeypatch: Any, **fields: Any) -> Outcome:
    """One step of the case, and the plain program's; ``fields`` of the experiment."""
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    monkeypatch.setattr(tracing, "trace_model", _shared_trace)
    batch = tokens(BATCH_SIZE, case.seed)
    job = dataclasses.replace(experiment(case.shape, case.clipped), **fields)
    engine = Engine(job, case.plan, chain(case.shape), cluster(), assign(cluster()))
    engine.init()
    result = engine.step(batch, 0).fetch()
    want, want_grads = reference(
        case.shape, case.clipped, model(case.shape)[1], batch, 0
    )
    return Outcome(
        engine=engine,
        result=result,
        grads=trained(case, engine.moments_like("grads")),
        params=flatten(engine.params()),
        want_result=want,
        want_grads=trained(case, want_grads),
    )


def gradient_error(outcome: Outcome) -> tuple[float, str]:
    """Largest error over its limit (1e-5 of the leaf + 1e-7 of all), and its leaf."""
    norm = global_norm(outcome.want_grads)

    def over_limit(name: str) -> float:
        want = outcome.want_grads[name]
        error = np.linalg.norm(outcome.grads[name] - want)
        return float(error / (1e-5 * np.linalg.norm(want) + 1e-7 * norm))

    # A NaN is the largest of all.
    errors = [(over_limit(name), name) for name in outcome.want_grads]
    return max(errors, key=lambda e: (e[0] != e[0], e[0]))


def trained(case: Case, named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the parameters that train."""
    return {name: x for name, x in named.items() if case.shape.trains(name)}


def check(case: Case, outcome: Outcome, inner: Any = INNER) -> None:
    """Law 1, the optimizer, and the next step's loss from equal parameters."""
    for key, want in outcome.want_result.items():
        assert outcome.result[key] == _near(want), (key, case)
    error, leaf = gradient_error(outcome)
    assert error <= 1.0, (error, leaf, case)
    _check_update(case, outcome, inner)
    second = tokens(BATCH_SIZE, case.seed + 1000)
    want, _ = reference(case.shape, case.clipped, outcome.engine.params(), second, 1)
    got = outcome.engine.step(second, 1).fetch()
    for key, value in want.items():
        assert got[key] == _near(value), (key, case)
    live = [b for b in outcome.engine.live_buffers() if not names.is_scale(b)]
    kinds = {buffer.kind.value for buffer in live}
    assert kinds <= {"State", "Param"}, kinds


def _check_update(case: Case, outcome: Outcome, inner: Any) -> None:
    """Parameters are those of the plain optax update on the run's own gradients; what
    does not train is as it was."""
    params = flatten(model(case.shape)[1])
    mine = trained(case, params)
    updates, _ = inner.update(outcome.grads, inner.init(mine), mine)
    for name in params.keys() - mine.keys():
        np.testing.assert_array_equal(outcome.params[name], params[name], err_msg=name)
    for name, p in mine.items():
        np.testing.assert_allclose(
            outcome.params[name], p + updates[name], rtol=1e-6, atol=1e-6, err_msg=name
        )


def _near(want: float) -> Any:
    import pytest

    return pytest.approx(want, rel=2e-5, abs=1e-6)
