"""Every layer by itself: what counts leave out, found by brute force and bounded.

Profile -> best_free -> Scored       all choices of a short chain
Profile -> free_bound_s -> seconds   no choice of any chain is faster (CP-SAT)
"""

import heapq
import itertools
import math

from hexijax.planner.offload.choice import (
    GRAD_BYTES,
    Kept,
    LayerChoice,
    Profile,
    State,
    Weights,
)
from hexijax.planner.offload.near import Allowed
from hexijax.planner.offload.room import Room
from hexijax.planner.offload.score import CLOSE, Rules, Scored, bound_s, scored

TICK_S = 1e-6
"""What CP-SAT counts time in; sums are rounded down."""

MIB = 2**20

EFFORT = 4.0
"""Deterministic seconds of CP-SAT."""


def options(allowed: Allowed) -> list[LayerChoice]:
    """Everything a layer may be given."""
    return [
        LayerChoice(weights=w, state=s, kept=k)
        for w, s, k in itertools.product(allowed.weights, allowed.state, allowed.kept)
    ]


def best_free(
    profile: Profile,
    allowed: Allowed | None = None,
    rules: Rules | None = None,
    *,
    below_s: float = math.inf,
) -> Scored | None:
    """The fastest of all choices that fit and are faster than asked.

    Exact up to the orders that are drawn; for chains of a few layers.
    """
    allowed, rules = allowed or Allowed(), rules or Rules()
    heap: list[tuple[float, int, tuple[LayerChoice, ...]]] = []
    every = itertools.product(options(allowed), repeat=len(profile.layers))
    for i, choice in enumerate(every):
        room = Room(profile, choice)
        fits = room.peak_bytes(room.least_limit_bytes) <= profile.device_bytes
        if fits and room.host_bytes <= profile.host.memory_bytes:
            bound = bound_s(rules.work(profile, choice))
            if bound < below_s * (1 - CLOSE):
                heap.append((bound, i, choice))
    heapq.heapify(heap)
    best: Scored | None = None
    while heap:
        bound, _, choice = heapq.heappop(heap)
        least_s = best.step_s if best else below_s
        if bound >= least_s * (1 - CLOSE):
            break
        found = scored(profile, choice, rules, below_s=least_s)
        if found and found.step_s < least_s:
            best = found
    return best


def free_bound_s(profile: Profile, allowed: Allowed | None = None) -> float:
    """Seconds that no choice of layers, each by itself, can beat; infinite: none fits.

    Each queue has the sum of its tasks, and at each layer there is room for what is
    kept by then and for one gradient.
    """
    from ortools.sat.python import cp_model

    every, model = options(allowed or Allowed()), cp_model.CpModel()
    layers, host, m = profile.layers, profile.host, profile.microbatches
    picks = [
        [model.new_bool_var(f"{i} {c}") for c in every] for i in range(len(layers))
    ]
    for row in picks:
        model.add_exactly_one(row)
    step = model.new_int_var(0, 2**60, "step")
    loads: dict[str, list[cp_model.LinearExpr]] = {}
    resting: list[cp_model.LinearExpr] = []
    on_host: list[cp_model.LinearExpr] = []
    kept: list[cp_model.LinearExpr] = []
    working: list[cp_model.LinearExpr] = []

    def add(name: str, pick: cp_model.IntVar, seconds: float) -> None:
        loads.setdefault(name, []).append(pick * int(seconds / TICK_S))

    for i, (own, row) in enumerate(zip(layers, picks, strict=True)):
        kept.append(cp_model.LinearExpr.sum([0 * row[0]]))
        working.append(cp_model.LinearExpr.sum([0 * row[0]]))
        for chosen, pick in zip(every, row, strict=True):
            policy = chosen.kept.remat
            add("compute", pick, m * (own.forward_s[policy] + own.backward_s[policy]))
            held, away = 0, 0
            if chosen.weights is Weights.STREAMED:
                moved = own.weights_bytes, own.weights_pieces
                add("in", pick, profile.in_s(*moved))
                away += own.weights_bytes
            else:
                held += own.weights_bytes
            if chosen.kept is Kept.HOST:
                left = m * own.kept_bytes[policy]
                add("in", pick, profile.in_s(left, m * own.kept_pieces))
                add("out", pick, profile.out_s(left, m * own.kept_pieces))
                away += own.kept_bytes[policy]
            else:
                kept[-1] += pick * (own.kept_bytes[policy] // MIB)
            working[-1] += pick * (own.working_bytes[policy] // MIB)
            if own.trains:
                match chosen.state:
                    case State.DEVICE:
                        add("compute", pick, own.resident_update_s)
                        held += own.state_bytes
                    case State.STREAMED:
                        add("compute", pick, own.resident_update_s)
                        come_s, leave_s = profile.state_s(i)
                        add("in", pick, come_s)
                        add("out", pick, leave_s)
                        away += own.state_bytes
                    case State.HOST:
                        grads = own.homed_params * GRAD_BYTES
                        add("out", pick, profile.grads_s(i))
                        add("host", pick, own.homed_params / host.update_params_per_s)
                        away += own.state_bytes + grads
            resting.append(pick * (held // MIB))
            on_host.append(pick * (away // MIB))
    for terms in loads.values():
        model.add(step >= cp_model.LinearExpr.sum(terms))
    room = Room(profile, (LayerChoice(),) * len(layers))
    room_mib = profile.device_bytes // MIB - profile.fixed_bytes // MIB
    for j in range(len(layers)):
        grads = min(room.least_limit_bytes, room.waiting_bytes[j]) // MIB
        model.add(
            cp_model.LinearExpr.sum([*resting, *kept[: j + 1], working[j]]) + grads
            <= room_mib + 1
        )
    model.add(cp_model.LinearExpr.sum(on_host) <= host.memory_bytes // MIB + 1)
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = EFFORT
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return math.inf
    return solver.best_objective_bound * TICK_S
