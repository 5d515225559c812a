"""How much a search tries: counted, never timed, so that equal input gives equal plans.

Cluster -> Effort ; Plan -> about how many instructions it costs to play
"""

import dataclasses

from hexijax.cluster import Cluster
from hexijax.plan.plan import Plan, Schedule
from hexijax.simulator.cycles import WORTH, passes_repeat

FEW = 4
"""Devices of which every layout is scored."""

LONGEST = 100_000
"""Instructions of a plan that is still simulated, where there is a shorter one."""

FIXED_INSTRUCTIONS = 80
"""What simulating a plan costs before its first instruction."""

CYCLE = 20
"""Microbatches, beside those that fill the stages, until what repeats is seen."""

STAGE_INSTRUCTIONS = 25
"""What each stage's memory and sums cost, equal replicas or not."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is tried, counted; by the number of devices and kinds."""

    scored: int
    """Layouts by formula."""

    played: int
    """Instructions of the layouts' plans that are simulated."""

    refined: int
    """Instructions of their variants."""

    remade: int
    """Instructions of a plan, at most, whose layout is decided anew."""

    stored: int = 4
    """Layouts that are simulated with their state where there is room."""

    walked: int = 4
    """Layouts whose variants are walked over, the best of the played."""

    varied: int = 12
    """Variants of the best that are looked at however long they are."""

    rescheduled: int = 2
    """Pipelines that are tried under other schedules, the best of the played."""

    reordered: int = 4
    """Of those that eager 1F1B makes faster by formula, how many are played."""

    offloaded: int = 500_000
    """Tasks of the orders that are drawn under each regime for what rests on hosts,
    once something fits."""

    @classmethod
    def of(cls, cluster: Cluster) -> "Effort":
        """What takes under a second up to 16 devices, and seconds for hundreds; of
        three kinds or more, which fit together in more ways, half a minute."""
        num_devices = len(cluster.devices)
        num_kinds = len({device.kind for device in cluster.devices})
        if num_devices <= FEW:
            return cls(
                scored=20_000,
                played=24_000,
                refined=24_000,
                remade=24_000,
                walked=16,
                rescheduled=48,
                reordered=12,
            )
        if num_devices <= 16:
            return cls(scored=150, played=5_000, refined=2_500, remade=7_000)
        if num_devices <= 128 and num_kinds > 2:
            return cls(scored=400, played=30_000, refined=20_000, remade=24_000)
        if num_devices <= 128:
            return cls(scored=100, played=3_000, refined=3_000, remade=8_000)
        if num_devices <= 1024:
            return cls(scored=200, played=32_000, refined=32_000, remade=24_000)
        return cls(
            scored=40,
            played=100_000,
            refined=60_000,
            remade=100_000,
            stored=2,
            varied=6,
        )


def num_instructions(plan: Plan) -> int:
    """About how many the simulator plays, equal replicas once, and its fixed cost."""
    forms = {
        tuple((s.layers, s.lanes, s.tensor, s.dtype) for s in r.stages): r
        for r in plan.replicas
    }
    played = FIXED_INSTRUCTIONS
    played += STAGE_INSTRUCTIONS * sum(len(r.stages) for r in plan.replicas)
    for replica in forms.values():
        stages = replica.stages
        cycle = len(stages) + min(len(stages), 16) + CYCLE
        microbatches = replica.microbatches
        if plan.schedule is Schedule.LAYERED:
            microbatches = 1 if passes_repeat(plan) else microbatches
        elif microbatches > WORTH * cycle:
            microbatches = cycle
        calls = sum(len(stage.segments) for stage in stages)
        played += microbatches * (2 * calls + 4 * len(stages))
    return played
