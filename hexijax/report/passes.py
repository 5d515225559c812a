"""What a plan gains and pays by accumulating layer by layer, in words.

Judged -> passing -> lines: layered, ministages, gathered for each pass, on the host
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from hexijax.costs.hosts import host_bytes, usable_host_bytes
from hexijax.plan.names import fold
from hexijax.plan.plan import Memory, Params, Plan, Schedule, Stage
from hexijax.report.judged import Judged, judge
from hexijax.report.words import gib, listed


def passing(judged: Judged) -> Iterator[str]:
    """A line each for what there is."""
    plan = judged.plan
    if plan.schedule is Schedule.LAYERED:
        yield _layered(judged)
    if any(Params.FREED in stage.params for _, stage in plan.stages()):
        yield _freed(judged)
    waiting = host_bytes(judged.memory, judged.problem.cluster)
    if waiting:
        yield _waiting(judged, waiting)


def _layered(judged: Judged) -> str:
    plan = judged.plan
    counts = sorted({replica.microbatches for replica in plan.replicas})
    times = listed([str(count) for count in counts])
    line = (
        f"accumulation is layered: a segment runs all its microbatches ({times}) "
        "before the next, and its gradient leaves while that computes"
    )
    held = [parts for parts in judged.memory.values() if parts.leaving_bytes]
    if held:
        most = max(held, key=lambda parts: parts.leaving_bytes)
        line += f"; gradients of two segments, {gib(most.leaving_bytes)}, are held"
    rounds = max(
        max(collections.Counter(s.devices for s in r.stages).values())
        for r in plan.replicas
    )
    few: dict[int, list[str]] = {}
    for _, stage in plan.stages():
        if stage.grads:
            few.setdefault(stage.grads, []).extend(stage.devices)
    for passes, devices in few.items():
        line += (
            f"; {fold(devices)} has room for the gradients of {passes} segments: a "
            "later one waits for their updates"
        )
    if rounds > 1:
        line += f"; ministages: a device holds up to {rounds} stages, one after another"
    return line


def _freed(judged: Judged) -> str:
    """What freeing saves and costs, against the same plan that keeps parameters."""
    kept = judge("kept", _kept(judged.plan), judged.problem)
    saved = {
        name: kept.memory[name].total_bytes - parts.total_bytes
        for name, parts in judged.memory.items()
    }
    most = max(saved, key=lambda name: saved[name])
    costs = judged.step_s / kept.step_s - 1
    line = f"gathered for each pass, and freed after it: {_where(judged, 'frees')}"
    line += f"; that saves {gib(saved[most])} on {most}"
    if costs > 0.0005:
        line += f" and costs {costs:.1%} of the step"
    if not kept.fits:
        line += "; kept, they would not fit"
    return line


def _waiting(judged: Judged, waiting: dict[str, int]) -> str:
    cluster = judged.problem.cluster
    by_size: dict[tuple[int, int], list[str]] = {}
    for node, num_bytes in waiting.items():
        has = usable_host_bytes(cluster, node)
        by_size.setdefault((num_bytes, has), []).append(node)
    parts = [
        f"{gib(num_bytes)} of {gib(has)} on {fold(nodes)}"
        for (num_bytes, has), nodes in by_size.items()
    ]
    kinds = (
        ("borders", "waits_on_host"),
        ("residuals", "keeps_on_host"),
        ("parameters", "streams"),
    )
    what = [
        f"{name} of {where}" for name, asks in kinds if (where := _where(judged, asks))
    ]
    if any(share.memory is Memory.HOST for share in judged.plan.state):
        what.append("state")
    return f"in host memory: {'; '.join(parts)}: {', '.join(what)}"


def _where(judged: Judged, what: str) -> str:
    """Layers of which something holds, by stages of one form."""
    chain = judged.problem.chain
    found: dict[str, int] = {}
    for _, stage in judged.plan.stages():
        layers = _layers(stage, what)
        if layers:
            first, last = (chain.layers[i].name for i in (layers[0], layers[-1]))
            name = first if first == last else f"{first} ... {last}"
            found[f"{name} ({len(layers)} layers)"] = 0
    names = [*found]
    more = f" and {len(names) - 3} other runs" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _layers(stage: Stage, what: str) -> Sequence[int]:
    return [
        layer
        for g in range(len(stage.segments))
        if getattr(stage, what)(g)
        for layer in range(*stage.segment_layers(g))
    ]


def _kept(plan: Plan) -> Plan:
    """The plan with what it frees kept all step."""
    kept = {Params.FREED: Params.KEPT}
    replicas = tuple(
        dataclasses.replace(
            replica,
            stages=tuple(
                dataclasses.replace(s, params=tuple(kept.get(p, p) for p in s.params))
                for s in replica.stages
            ),
        )
        for replica in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas, prediction=None)
