"""A plan in words and as a picture, for people.

plan, chain, cluster -> explain -> text: the picture, each stage's load, the limit
"""

from collections.abc import Iterator, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.memory import MOMENTS, plan_memory
from hexijax.layers.chain import Chain
from hexijax.plan.names import fold
from hexijax.plan.plan import Plan, Stage, stage_place
from hexijax.planner.estimate import Estimate, estimate

WIDTH = 72
"""Columns that a picture's layers share."""


def explain(
    plan: Plan, chain: Chain, cluster: Cluster, *, moments: int = MOMENTS
) -> str:
    """What each stage does, how busy and how full it is, and what limits the step."""
    made = estimate(plan, chain, cluster, moments=moments)
    lines = [picture(plan, chain, cluster), ""]
    lines += _table(plan, chain, cluster, made, moments)
    lines += ["", *_limits(plan, cluster, made)]
    return "\n".join(lines)


def picture(plan: Plan, chain: Chain, cluster: Cluster) -> str:
    """Stages as boxes, as wide as their share of the layers; a line of boxes a replica.

    ```
    replica 0   5 x 8 samples
      |embed..blocks/2    |blocks/3..head           |
      |n0/0-3 fast 2x2    |n1/0 slow                |
    ```
    """
    lines: list[str] = []
    for r, replica in enumerate(plan.replicas):
        lines.append(
            f"replica {r}   {replica.microbatches} x {replica.microbatch_size} samples"
        )
        texts = [_box(stage, chain, cluster) for stage in replica.stages]
        widths = [
            max(
                len(text) + 1,
                *(len(other) + 1 for other in pair),
                WIDTH * stage.num_layers // len(chain.layers),
            )
            for (text, *pair), stage in zip(texts, replica.stages, strict=True)
        ]
        for row in zip(*texts, strict=True):
            cells = (text.ljust(w) for text, w in zip(row, widths, strict=True))
            lines.append(f"  |{'|'.join(cells)}|")
    return "\n".join(lines)


def _box(stage: Stage, chain: Chain, cluster: Cluster) -> tuple[str, str]:
    names = [layer.name for layer in chain.layers[slice(*stage.layers)]]
    layers = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    kind = cluster.device(stage.devices[0]).kind
    return f"{layers} ({len(names)})", f"{fold(stage.devices)} {kind}{_shape(stage)}"


def _shape(stage: Stage) -> str:
    parts = [f" {stage.lanes} lanes"] if stage.lanes > 1 else []
    parts += [f" tensor {stage.tensor}"] if stage.tensor > 1 else []
    return ",".join(parts)


def _table(
    plan: Plan, chain: Chain, cluster: Cluster, made: Estimate, moments: int
) -> Iterator[str]:
    memory = plan_memory(plan, chain, cluster, moments=moments)
    rows = [("stage", "layers", "busy", "memory promised / usable", "most of it")]
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            busy_s = made.replicas[r].stage_s[s] * replica.microbatches
            fullest = max(
                stage.devices,
                key=lambda name: (
                    memory[name].total_bytes / cluster.device(name).usable_memory_bytes
                ),
            )
            parts = memory[fullest]
            usable = cluster.device(fullest).usable_memory_bytes
            rows.append(
                (
                    stage_place(r, s),
                    f"{stage.layers[0]}-{stage.layers[1] - 1}",
                    f"{busy_s / made.step_s:.0%}",
                    f"{_gib(parts.total_bytes)} / {_gib(usable)}",
                    parts.largest,
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _limits(plan: Plan, cluster: Cluster, made: Estimate) -> Iterator[str]:
    """The parts of the step, and the stage or link that sets its pace."""
    yield (
        f"step {_ms(made.step_s)} predicted: compute {_ms(made.compute_s)}, gradients "
        f"and parameters beyond it {_ms(made.sync_s)}, update {_ms(made.update_s)}"
    )
    if made.dispatch_s > made.compute_s:
        yield (
            f"limited by dispatch: one host needs {_ms(made.dispatch_s)} for its "
            "calls; larger microbatches or segments mean fewer"
        )
        return
    r = max(range(len(made.replicas)), key=lambda i: made.replicas[i].end_s)
    slow = made.replicas[r]
    s = max(range(len(slow.stage_s)), key=lambda i: slow.stage_s[i])
    kind = cluster.device(plan.replicas[r].stages[s].devices[0]).kind
    if made.sync_s > made.compute_s:
        yield "limited by the link that gradients cross between replicas"
    elif slow.link_bound:
        yield f"limited by the link between stages of replica {r}"
    else:
        bubble = 1 - plan.replicas[r].microbatches * slow.next_s / slow.end_s
        yield (
            f"limited by stage {stage_place(r, s)} ({kind}), {_ms(slow.stage_s[s])} a "
            f"microbatch; filling and draining its pipeline takes {bubble:.0%}"
        )
    idle = _unused(plan, cluster)
    if idle:
        yield f"unused: {fold(idle)}"


def _unused(plan: Plan, cluster: Cluster) -> Sequence[str]:
    used = {name for _, stage in plan.stages() for name in stage.devices}
    return [device.name for device in cluster.devices if device.name not in used]
