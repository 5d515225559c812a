"""A judged plan in words: who does what, what limits the step, what else was found.

    Choices, limits -> explain -> text for the screen and the page

``picture`` draws it, ``stages`` and ``others`` are its tables, ``reasons`` its lines.
"""

from collections.abc import Iterator, Sequence

from hexijax.plan.names import fold
from hexijax.plan.plan import stage_place
from hexijax.planner import Objective
from hexijax.report.drawing import alike, picture
from hexijax.report.grounds import grounds
from hexijax.report.judged import Judged
from hexijax.report.limits import FASTER, Limit, What
from hexijax.report.objectives import beside, cell, costs, heading
from hexijax.report.offloaded import offloading
from hexijax.report.passes import passing
from hexijax.report.verdict import Choices, left_out
from hexijax.report.words import columns, gib, rate, seconds

MOST_TOLD = 3
"""Amounts of state that are told one by one."""

Table = list[Sequence[str]]
"""Rows of cells; the first row is the heading."""


def explain(choices: Choices, found: Sequence[Limit]) -> str:
    """All of it, without the verdict; no line break at the end."""
    judged = choices.ours
    problem = judged.problem
    lines = [picture(judged.plan, problem.chain, problem.cluster), ""]
    lines += [headline(judged), *reasons(choices, found), ""]
    lines += columns(stages(judged))
    if choices.runners_up():
        lines += ["", *columns(others(choices), right=range(1, 9))]
    return "\n".join(lines)


def brief(judged: Judged) -> str:
    """What a run shows before it starts: the picture, the step, the stages."""
    problem = judged.problem
    drawn = picture(judged.plan, problem.chain, problem.cluster)
    return "\n".join([drawn, "", headline(judged), *columns(stages(judged))])


def headline(judged: Judged) -> str:
    """The step and its rates, and what a token costs."""
    mfu = "" if judged.mfu is None else f", MFU {judged.mfu:.1%}"
    searched = f"; found in {judged.search_s:.2g} s" if judged.search_s else ""
    step = f"step {seconds(judged.step_s)}, {rate(judged.tokens_per_s)} tokens/s{mfu}"
    if judged.problem.objective is Objective.STEP:
        step += f", {judged.fraction_of_bound:.1%} of the bound"
        step += f" ({seconds(judged.bound_s)})"
    return f"{'; '.join(filter(None, (step, costs(judged))))}{searched}"


def stages(judged: Judged) -> Table:
    """A row a stage: how busy, what it waits for, how full. Equal replicas once."""
    rows: Table = [
        (
            "stage",
            "devices",
            "busy",
            "waits for",
            "promised",
            "usable",
            "nominal",
            "most",
        )
    ]
    cluster = judged.problem.cluster
    for run in alike(judged.plan, cluster):
        for s, stage in enumerate(run.replica.stages):
            fullest = max(stage.devices, key=lambda name: _fullness(judged, name))
            parts, device = judged.memory[fullest], cluster.device(fullest)
            times = f" x{run.count}" if run.count > 1 else ""
            rows.append(
                (
                    f"{stage_place(run.first, s)}{times}",
                    f"{fold(stage.devices)} {device.kind}",
                    f"{judged.timeline.utilisation(fullest):.0%}",
                    _waits(judged, fullest),
                    gib(parts.total_bytes),
                    gib(device.usable_memory_bytes),
                    gib(device.profile.nominal_memory_bytes),
                    parts.largest,
                )
            )
    return rows


def _fullness(judged: Judged, device: str) -> float:
    usable = judged.problem.cluster.device(device).usable_memory_bytes
    return judged.memory[device].total_bytes / usable


def _waits(judged: Judged, device: str) -> str:
    """The two largest causes of idle time, with their parts of the step."""
    causes = sorted(judged.timeline.idle_s[device].items(), key=lambda item: -item[1])
    parts = [f"{c} {s / judged.step_s:.0%}" for c, s in causes[:2]]
    return ", ".join(p for p in parts if not p.endswith(" 0%")) or "-"


def others(choices: Choices) -> Table:
    """A row a plan, ours first, then the runners-up."""
    own = heading(choices.ours.problem.objective)
    rows: Table = [
        ("plan", "step", "tokens/s", "MFU", *own, "of bound", "devices", "ratio")
    ]
    for judged in (choices.ours, *choices.runners_up()):
        rows.append(
            (
                judged.name,
                seconds(judged.step_s),
                rate(judged.tokens_per_s),
                "-" if judged.mfu is None else f"{judged.mfu:.1%}",
                *cell(judged),
                f"{judged.fraction_of_bound:.1%}",
                f"{len(judged.used)}",
                f"{judged.cost / choices.ours.cost:.2f}x",
            )
        )
    return rows


def reasons(choices: Choices, found: Sequence[Limit]) -> Iterator[str]:
    """What limits the step, why devices are unused, and what times rest on."""
    for i, limit in enumerate(found):
        if limit.what is What.MEMORY:
            yield _memory(limit)
        elif i == 0:
            yield f"limited by {_bottleneck(choices.ours, limit)}"
    if any(share.shares for share in choices.ours.plan.state):
        yield _uneven_state(choices.ours)
    yield from passing(choices.ours)
    yield from offloading(choices.ours)
    if choices.ours.unused:
        yield _unused(choices)
    yield from grounds(choices.ours)


def _bottleneck(judged: Judged, limit: Limit) -> str:
    saves = f"{limit.saves:.1%} of the step"
    match limit.what:
        case What.DISPATCH:
            return (
                f"dispatch: the host of {limit.name} is busy all the time with its "
                "calls; larger microbatches or segments mean fewer"
            )
        case What.DEVICE:
            place, busy = _busiest(judged, limit.name)
            return (
                f"device {limit.name}: {FASTER - 1:.0%} faster, it saves {saves}; "
                f"its busiest stage is {place}, {busy:.0%}"
            )
        case _:
            way, num_bytes = _fullest_way(judged)
            return (
                f"the links {limit.name}: {FASTER - 1:.0%} faster, they save {saves}; "
                f"most crosses '{way}', {num_bytes / 1e9:.3g} GB a step"
            )


def _busiest(judged: Judged, kind: str) -> tuple[str, float]:
    """The busiest stage on a kind, and its share of the step."""
    cluster, timeline = judged.problem.cluster, judged.timeline
    return max(
        (
            (place, timeline.utilisation(stage.devices[0]))
            for place, stage in judged.plan.stages()
            if cluster.device(stage.devices[0]).kind == kind
        ),
        key=lambda item: item[1],
    )


def _fullest_way(judged: Judged) -> tuple[str, int]:
    ways = judged.timeline.link_bytes.items()
    return max(ways, key=lambda item: item[1], default=("no link", 0))


def _memory(limit: Limit) -> str:
    if limit.saves < 0.001:
        return "memory costs nothing: with more of it the same plan is no faster"
    return f"memory costs {limit.saves:.1%}: what does not fit is computed twice"


def _uneven_state(judged: Judged) -> str:
    """Which devices hold how much state, where they do not hold even parts."""
    held: dict[int, list[str]] = {}
    for name, parts in judged.memory.items():
        held.setdefault(parts.state_bytes, []).append(name)
    most = sorted(held, reverse=True)
    told = [f"{gib(n)} on {_few(held[n])}" for n in most[:MOST_TOLD]]
    if len(most) > MOST_TOLD:
        told.append(f"down to {gib(most[-1])} on {_few(held[most[-1]])}")
    return f"state is where there is room: {'; '.join(told)}"


def _unused(choices: Choices) -> str:
    """Which devices idle, and what using them would do."""
    ours, everyone = choices.ours, choices.everyone
    names = f"unused: {_few(ours.unused)} ({left_out(ours)})"
    if any(name in ours.memory for name in ours.unused):
        names += " to compute; some hold state"
    if choices.cut_short and everyone is None:
        return f"{names}; the comparison that says why was interrupted"
    if everyone is None and not choices.refused:
        return f"{names}; `hexijax plan` compares with a plan that uses them"
    if everyone is None:
        return f"{names}, because no plan with every device stands. {choices.refused}"
    longer = everyone.step_s / ours.step_s - 1
    dearer = beside(ours.problem.objective, everyone.cost / ours.cost - 1)
    idlest = min(everyone.used, key=everyone.timeline.utilisation)
    return (
        f"{names}; with every device a step takes {seconds(everyone.step_s)}, "
        f"{longer:+.1%}{dearer}, and {idlest} would compute in "
        f"{everyone.timeline.utilisation(idlest):.0%} of it and wait for "
        f"{_waits(everyone, idlest)}"
    )


def _few(names: Sequence[str]) -> str:
    """The names, folded, and cut where they are many."""
    parts = fold(names).split(",")
    more = f" and {len(parts) - 6} more" if len(parts) > 6 else ""
    return f"{','.join(parts[:6])}{more}"
