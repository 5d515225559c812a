"""What a plan does with the memory of its hosts, in words.

Judged -> offloading -> lines: what is there, where updates run, how busy the link is
"""

from collections.abc import Iterator

from hexijax.costs.host_rates import HostSide, host_side
from hexijax.plan.names import fold
from hexijax.plan.plan import Memory, Params, Plan, UpdateOrder
from hexijax.program.boxes import state_share
from hexijax.report.judged import Judged
from hexijax.report.words import listed

STREAMED = (Memory.HOST, Memory.DEVICE)
HOSTED = (Memory.HOST, Memory.HOST)


def offloading(judged: Judged) -> Iterator[str]:
    """A line each for what there is."""
    groups = _groups(judged)
    if any(Params.STREAMED in stage.params for _, stage in judged.plan.stages()):
        yield (
            "streamed parameters come from host memory for each pass, while the pass "
            "before computes, and go after it"
        )
    if groups:
        yield _state(groups)
        yield _order(judged.plan)
    link = _link(judged)
    if link:
        yield link


def _groups(judged: Judged) -> dict[tuple[Memory, Memory], list[str]]:
    """Parameter groups whose state rests on a host, by where they are updated."""
    found: dict[tuple[Memory, Memory], list[str]] = {}
    for group in judged.problem.chain.groups:
        share = state_share(judged.plan, group)
        if group.trainable and share is not None and share.memory is Memory.HOST:
            found.setdefault((share.memory, share.update), []).append(group.name)
    return found


def _state(groups: dict[tuple[Memory, Memory], list[str]]) -> str:
    words = {
        STREAMED: "passes through the device in chunks for its update",
        HOSTED: "is updated by the host's cores",
    }
    parts = [f"of {_few(groups[how])} {words[how]}" for how in words if how in groups]
    return f"state in host memory: {'; '.join(parts)}"


def _few(names: list[str]) -> str:
    if len(names) <= 2:
        return listed(names)
    return f"{names[0]} ... {names[-1]} ({len(names)} groups)"


def _order(plan: Plan) -> str:
    if plan.order is UpdateOrder.PRIORITY:
        return (
            "updates that find no time beside the backwards run in the next step, each "
            "before the forward that needs it"
        )
    return "all updates run before the next step's first forward"


def _link(judged: Judged) -> str:
    """Of each device's way to its host, how much of the step it is busy."""
    cluster, timeline = judged.problem.cluster, judged.timeline
    busy: dict[str, list[str]] = {}
    for device in cluster.devices:
        host = host_side(cluster, device.name)
        inward = timeline.link_bytes.get(f"{device.name} host in", 0)
        outward = timeline.link_bytes.get(f"{device.name} host out", 0)
        if inward or outward:
            comes = inward / host.in_bytes_per_s / judged.step_s
            goes = outward / host.out_bytes_per_s / judged.step_s
            words = f"{comes:.0%} of the step in and {goes:.0%} out"
            cores = _cores(judged, device.node, host)
            words += f", its cores {cores:.0%}" if cores else ""
            busy.setdefault(words, []).append(device.name)
    parts = [f"of {fold(names)} {words}" for words, names in busy.items()]
    return f"the host link is busy: {'; '.join(parts)}" if parts else ""


def _cores(judged: Judged, node: str, host: HostSide) -> float:
    """Part of the step in which a node's cores update: parameters, over their rate."""
    cluster, plan = judged.problem.cluster, judged.plan
    hosted = set(_groups(judged).get(HOSTED, ()))
    params = 0.0
    for group in judged.problem.chain.groups:
        if group.name in hosted:
            users = [
                name
                for _, stage in plan.stages()
                if any(stage.layers[0] <= at < stage.layers[1] for at in group.layers)
                for name in stage.devices
            ]
            here = sum(cluster.device(name).node == node for name in users)
            params += group.size * here / max(1, len(users))
    sharing = sum(device.node == node for device in cluster.devices)
    return params / (host.update_params_per_s * sharing) / judged.step_s
