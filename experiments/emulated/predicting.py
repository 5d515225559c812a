"""What the simulator says of a plan before it runs."""

from collections.abc import Mapping
from typing import Any

from experiments.emulated.cards import Setting
from experiments.emulated.overlap import both, length, merged
from experiments.emulated.plans import on_one
from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Plan
from hexijax.program.lower import StepRules
from hexijax.simulator import Timeline, predict


def promised(plan: Plan, chain: Chain, cluster: Cluster) -> dict[str, int]:
    """Peak bytes by device."""
    found = plan_memory(plan, chain, cluster)
    return {device: parts.total_bytes for device, parts in found.items()}


def predicted(
    plan: Plan, chain: Chain, cluster: Cluster, rules: StepRules | None = None
) -> dict[str, Any]:
    """Seconds of a step, peaks, and by device what computes, moves and waits."""
    timeline = predict(plan, chain, cluster, rules=rules, folded=False)
    return {
        "predicted_s": timeline.step_s,
        "promised_bytes": promised(plan, chain, cluster),
        "predicted_busy_s": {
            device: sum(parts.values()) for device, parts in timeline.busy_s.items()
        },
        "predicted_idle_s": {
            device: {str(cause): seconds for cause, seconds in causes.items()}
            for device, causes in timeline.idle_s.items()
        },
        "predicted_link_bytes": dict(timeline.link_bytes),
        "predicted_overlap": overlaps(timeline),
    }


def overlaps(timeline: Timeline) -> dict[str, dict[str, float]]:
    """By device: seconds in which bytes leave it or arrive, and those of them in which
    it computes."""
    computing: dict[str, list[tuple[float, float]]] = {d: [] for d in timeline.busy_s}
    moving: dict[str, list[tuple[float, float]]] = {d: [] for d in timeline.busy_s}
    for event in timeline.events:
        for name, start_s, end_s, _ in event.queues:
            owner, *way = name.split(" ")
            if owner in computing:
                (moving if way else computing)[owner].append((start_s, end_s))
    found: dict[str, dict[str, float]] = {}
    for device, spans in moving.items():
        compute, moves = merged(computing[device]), merged(spans)
        found[device] = {
            "compute": length(compute),
            "peer": length(moves),
            "peer beside compute": length(both(moves, compute)),
        }
    return found


def alone(
    setting: Setting, chain: Chain, cluster: Cluster, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Predicted and measured steps of each card alone."""
    rows: dict[str, Any] = {}
    for number, card in enumerate(found.get("alone", ())):
        for rate in card.get("rates", ()):
            plan = on_one(
                setting,
                chain,
                setting.devices[number],
                size=rate["microbatch"],
                microbatches=rate["batch_size"] // rate["microbatch"],
                remat=Remat(rate["remat"]),
            )
            rows[f"card {number} by {rate['microbatch']} {rate['remat']}"] = {
                "predicted_s": predict(plan, chain, cluster).step_s,
                "measured_s": rate["step_s"],
            }
    return rows
