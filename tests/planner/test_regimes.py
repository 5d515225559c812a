"""Layered accumulation, freed parameters and waiting borders, found by the search."""

import collections
import dataclasses
import math
import random
from collections.abc import Callable

import pytest

from hexijax.costs.hosts import full_host
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.checks import check
from hexijax.plan.plan import Plan, Schedule
from hexijax.plan.text import parse, render
from hexijax.planner import InfeasiblePlanError, PlanOptions, make_plan
from hexijax.program.lower import StepRules, lower
from hexijax.simulator import predict
from tests.planner.regimes import best_s
from tests.planner.small_cases import Case, small_case

ONLY = PlanOptions(remat=(Remat.FULL,), layers_per_segment=1, offload=False)
"""The enumeration's space, and whatever else there is."""

WITHIN = 1.02
NO_SLOWER = 1.005
"""Effort is counted, and what is tried more takes of it."""
MOST_SAMPLES, MOST_LAYERS, MOST_DEVICES = 6, 5, 3


def step_s(case: Case, batch_size: int, options: PlanOptions = ONLY) -> float:
    """Of the planner's plan; infinite where it finds none."""
    try:
        plan = make_plan(
            case.chain, case.cluster, batch_size=batch_size, options=options
        )
    except InfeasiblePlanError:
        return math.inf
    return predict(plan, case.chain, case.cluster, events=False).step_s


def over_best(case: Case) -> float | None:
    """The planner's step over the best of all of one stage; None: nothing fits."""
    batch_size = min(case.batch_size, MOST_SAMPLES)
    ours_s = step_s(case, batch_size)
    least_s = best_s(case.chain, case.cluster, batch_size, ours_s)
    return None if least_s == math.inf else ours_s / least_s


@pytest.mark.parametrize("seed", [15, 18, 45])
def test_no_plan_of_one_stage_replicas_is_faster_under_any_regime(seed: int):
    found = over_best(small_case(seed))
    assert found is not None
    assert found <= WITHIN


@pytest.mark.laws
def test_none_of_many_is(record_property: Callable[[str, object], None]):
    cases = [
        case
        for case in map(small_case, range(200))
        if 1 < len(case.cluster.devices) <= MOST_DEVICES
        and len(case.chain.layers) <= MOST_LAYERS
    ]
    found = {str(case): ratio for case in cases if (ratio := over_best(case))}
    worst = max(found.values())
    record_property("one-stage plans under regimes", f"{len(found)}, {worst:.4f}")
    late = [f"{ratio:.4f} {name}" for name, ratio in found.items() if ratio > WITHIN]
    assert not late, "\n".join(late)
    assert len(found) >= 40


def tight(seed: int) -> Case:
    """A case whose devices together have about what the model needs at least.

    Of every other one activations are small beside parameters.
    """
    case, rng = small_case(seed), random.Random(seed)
    if seed % 2:
        case = dataclasses.replace(case, chain=light(case.chain))
    need = 20 * case.chain.num_params / len(case.cluster.devices)
    layer = max(layer.activation_bytes[Remat.NONE] for layer in case.chain.layers)
    profiles = tuple(
        dataclasses.replace(
            profile,
            usable_memory_bytes=min(
                int(need * rng.uniform(0.8, 2.0) + layer * rng.uniform(2, 6)),
                profile.nominal_memory_bytes,
            ),
        )
        for profile in case.cluster.profiles
    )
    cluster = dataclasses.replace(case.cluster, profiles=profiles)
    return dataclasses.replace(case, cluster=cluster)


def light(chain: Chain) -> Chain:
    """With a sixteenth of the activations."""
    layers = tuple(
        dataclasses.replace(
            layer,
            border_bytes=layer.border_bytes // 16,
            joined_bytes=layer.joined_bytes // 16,
            activation_bytes={p: n // 16 for p, n in layer.activation_bytes.items()},
        )
        for layer in chain.layers
    )
    return dataclasses.replace(chain, layers=layers)


def found(case: Case, options: PlanOptions) -> Plan | None:
    try:
        return make_plan(
            case.chain, case.cluster, batch_size=case.batch_size, options=options
        )
    except InfeasiblePlanError:
        return None


def check_found(case: Case) -> tuple[collections.Counter[str], float]:
    """What holds of every chosen plan: counts what it makes use of, and its step over
    that of a search without layered schedules, 0 where either finds none."""
    chain, cluster = case.chain, case.cluster
    plan, plain = (
        found(case, PlanOptions(layered=layered)) for layered in (True, False)
    )
    if plan is None:
        assert plain is None
        return collections.Counter(), 0.0
    check(plan, chain, cluster)
    assert parse(render(plan, chain)) == plan
    # What has room for gradients of a few passes only is for training without clipping.
    few = any(stage.grads for _, stage in plan.stages())
    every = (StepRules(),) if few else (StepRules(), StepRules(clip=True))
    lower(plan, chain, rules=every[-1])  # the checker proves it
    promised = plan_memory(plan, chain, cluster)
    assert not full_host(promised, cluster)
    for rules in every:
        timeline = predict(plan, chain, cluster, rules=rules, events=False, memory=True)
        for device, curve in timeline.memory.items():
            assert curve.peak_bytes <= promised[device].total_bytes, str(case)
            usable = cluster.device(device).usable_memory_bytes
            assert promised[device].total_bytes <= usable
    ratio = 0.0
    if plain is not None:
        assert plan.prediction is not None
        assert plain.prediction is not None
        ratio = plan.prediction.step_s / plain.prediction.step_s
    stages = [stage for _, stage in plan.stages()]
    used = {
        "planned": True,
        "planned by these alone": plain is None,
        "layered": plan.schedule is Schedule.LAYERED,
        "freed": any(stage.params for stage in stages),
        "waits": any(stage.waits for stage in stages),
        "ministages": plan.schedule is Schedule.LAYERED
        and any(len(replica.stages) > 1 for replica in plan.replicas),
    }
    return collections.Counter(name for name, there in used.items() if there), ratio


@pytest.mark.parametrize("seed", [29, 37, 118])
def test_a_chosen_plan_keeps_its_promises_and_is_no_slower(seed: int):
    counts, ratio = check_found(tight(seed))
    assert counts["planned"]
    assert ratio <= NO_SLOWER


@pytest.mark.laws
def test_every_chosen_plan_does(record_property: Callable[[str, object], None]):
    found = {seed: check_found(tight(seed)) for seed in range(150)}
    counts = sum((used for used, _ in found.values()), collections.Counter())
    record_property("plans where memory is short", dict(counts))
    late = [f"{r:.4f} {tight(s)}" for s, (_, r) in found.items() if r > NO_SLOWER]
    assert not late, "\n".join(late)
    assert counts["planned"] > 75
    assert min(counts["layered"], counts["freed"], counts["waits"]) > 3
