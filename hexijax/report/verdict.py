"""Is mixing worth it? One line, from plans that were judged alike.

ours, the best plan alone, the plan on all devices -> verdict -> the first line
"""

import dataclasses

from hexijax.report.judged import Judged
from hexijax.report.objectives import more, over, than_found
from hexijax.report.words import listed, plural, short_kinds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Our plan and what it is held against."""

    ours: Judged
    """The plan that is proposed, or the one that was given."""

    found: Judged | None = None
    """What the search finds, where a plan was given."""

    next_best: tuple[Judged, ...] = ()
    """Plans of other layouts that the search found, the best first."""

    alone: tuple[Judged, ...] = ()
    """The best plan on each kind and each node, without the others."""

    everyone: Judged | None = None
    """The best plan that must use every device; None: there is none."""

    refused: str = ""
    """Why no plan uses every device."""

    cut_short: bool = False
    """The comparison was interrupted."""

    @property
    def best_alone(self) -> Judged | None:
        """The best plan on one kind or one node."""
        return min(self.alone, key=lambda j: j.cost, default=None)

    def runners_up(self) -> tuple[Judged, ...]:
        """The other plans, the best first; equal plans once."""
        two = (self.found, self.everyone)
        others = [*(judged for judged in two if judged), *self.alone, *self.next_best]
        seen = {self.ours.plan.replicas}
        found: list[Judged] = []
        for other in sorted(others, key=lambda j: j.cost):
            if other.plan.replicas not in seen:
                seen.add(other.plan.replicas)
                found.append(other)
        return tuple(found)


def verdict(choices: Choices) -> str:
    """Whether to mix, and what it gives or costs; of a plan given, what it loses."""
    if choices.found:
        ratio = choices.ours.cost / choices.found.cost
        loses = than_found(choices.ours.problem.objective, ratio)
        searched = dataclasses.replace(choices, ours=choices.found, found=None)
        return f"{verdict(searched)}; the plan given {loses} of the plan a search finds"
    ours = choices.ours
    cluster, best = ours.problem.cluster, choices.best_alone
    if len(cluster.devices) == 1:
        return f"one device: nothing to mix; {_of_bound(ours)}"
    kinds = {device.kind for device in cluster.devices}
    if len(kinds) == 1 and len(cluster.nodes) == 1:
        short = short_kinds(cluster)[next(iter(kinds))]
        return (
            f"{len(cluster.devices)} equal {short}s: nothing to mix; {_of_bound(ours)}"
        )
    if choices.cut_short and (best is None or (ours.unused and not choices.everyone)):
        return f"interrupted before mixing was compared; {_of_bound(ours)}"
    if ours.unused:
        return _leave_out(choices)
    if best is None:
        return "mixing makes it fit: no kind and no node holds the model alone"
    joins = "mixing gives" if len(kinds) > 1 else f"{len(cluster.nodes)} nodes give"
    return f"{joins} {_gain(ours, best)}"


def alone_name(judged: Judged) -> str:
    """``your 3 A800s alone``, ``your H100 alone`` or ``node r4090 alone``."""
    cluster = judged.problem.cluster
    used = [cluster.device(name) for name in judged.used]
    nodes = {device.node for device in used}
    kinds = {device.kind for device in used}
    if len(kinds) > 1:
        return f"node {nodes.pop()} alone"
    kind = kinds.pop()
    short = short_kinds(cluster)[kind]
    same = [device for device in cluster.devices if device.kind == kind]
    if len(used) == len(same):
        count = f"{len(used)} " if len(used) > 1 else ""
        return f"your {count}{plural(short, len(used))} alone"
    if len(nodes) == 1 and len(used) > 1:
        return f"the {len(used)} {short}s of node {nodes.pop()} alone"
    return f"{len(used)} of your {len(same)} {short}s alone"


def left_out(judged: Judged) -> str:
    """``the 3090s`` where a whole kind is unused, ``2 of 8 A100s`` where some are."""
    cluster = judged.problem.cluster
    short = short_kinds(cluster)
    words = []
    for kind in dict.fromkeys(cluster.device(name).kind for name in judged.unused):
        total = sum(device.kind == kind for device in cluster.devices)
        idle = sum(cluster.device(name).kind == kind for name in judged.unused)
        words.append(
            f"the {plural(short[kind], total)}"
            if idle == total
            else f"{idle} of {total} {short[kind]}s"
        )
    return listed(words)


def _leave_out(choices: Choices) -> str:
    ours, everyone = choices.ours, choices.everyone
    names = left_out(ours)
    pronoun = "it" if len(ours.unused) == 1 else "they"
    best = choices.best_alone
    rest = ""
    if best and best.cost > ours.cost * 1.005:
        rest = f"; the others give {_gain(ours, best)}"
    if everyone is None:
        return f"leave {names} out: no plan with all {_count(ours)} fits{rest}"
    cost = everyone.cost / ours.cost - 1
    if cost < 0.005:
        return f"leave {names} out: {pronoun} would gain nothing{rest}"
    verb = "costs" if pronoun == "it" else "cost"
    behind = more(ours.problem.objective)
    return f"leave {names} out: {pronoun} {verb} {cost:.0%}{behind}{rest}"


def _gain(ours: Judged, best: Judged) -> str:
    ratio, than = best.cost / ours.cost, over(ours.problem.objective)
    return f"{ratio:.2f}x {than} {alone_name(best)}"


def _count(judged: Judged) -> str:
    return f"{len(judged.problem.cluster.devices)} devices"


def _of_bound(judged: Judged) -> str:
    return f"the plan reaches {judged.fraction_of_bound:.0%} of the bound"
