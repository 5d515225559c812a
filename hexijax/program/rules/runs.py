"""Each layer runs forward and backward exactly once for each microbatch."""

from collections import Counter

from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan
from hexijax.program.program import Backward, Forward, Load, Part, Program
from hexijax.program.rules.facts import Facts, numbered
from hexijax.program.rules.fault import Faults

Run = tuple[str, Place, int, int]
"""What runs (forward, or the input or weight part), place, segment, microbatch."""

PARTS = {
    Part.BOTH: ("input", "weight"),
    Part.INPUT: ("input",),
    Part.WEIGHT: ("weight",),
}


def check_layers(plan: Plan, chain: Chain, faults: Faults) -> None:
    """The stages of each replica hold all layers, each once and in order."""
    for r, replica in enumerate(plan.replicas):
        held = [
            layer
            for stage in replica.stages
            for segment in range(len(stage.segments))
            for layer in range(*stage.segment_layers(segment))
        ]
        empty = any(stage.num_layers < 1 for stage in replica.stages)
        short = any(min(stage.segments) < 1 for stage in replica.stages)
        if held != list(range(len(chain.layers))) or empty or short:
            stages = " ".join(
                f"{stage.layers[0]}-{stage.layers[1]}" for stage in replica.stages
            )
            faults.missing(
                f"The stages of replica r{r} hold layers {stages} (first and the one "
                f"past the last); the chain has {len(chain.layers)} layers. Each layer "
                "sits in exactly one stage, in order, no stage or segment is empty, "
                "and a stage's segments sum to its layers."
            )


def check_runs(program: Program, facts: Facts, faults: Faults) -> None:
    """Counts Forwards and both parts of the Backwards of one body."""
    every = ("forward", "input", "weight")
    due: Counter[Run] = Counter(
        (way, place, segment, m)
        for (place, segment), found in facts.segments.items()
        for m in range(facts.microbatches[place])
        for way in (every if facts.trains and found.has_backward else ("forward",))
    )
    split: dict[tuple[Place, int], bool] = {}
    for position, instr in numbered(program):
        if not isinstance(instr, Forward | Backward):
            continue
        if isinstance(instr, Backward):
            whole = instr.part is Part.BOTH
            if split.setdefault((instr.place, instr.segment), not whole) is whole:
                faults.at(
                    position,
                    f"Some backwards of segment g{instr.segment} of {instr.place} are "
                    "split and some are not. All microbatches of a segment run the "
                    "same programs: split all of them, or none.",
                )
        done = ("forward",) if isinstance(instr, Forward) else PARTS[instr.part]
        if isinstance(instr, Forward):
            _check_keeps(position, instr, facts, faults)
        for way in done:
            for m in range(*instr.microbatches):
                run = (way, instr.place, instr.segment, m)
                if run not in due:
                    faults.at(position, _unknown(run, facts))
                due[run] -= 1
                if due[run] < 0:
                    faults.at(
                        position,
                        f"{_name(run)} runs a second time. Each segment runs once for "
                        "each microbatch of a step; drop one of the two.",
                    )
    late = [run for run, count in due.items() if count]
    if late:
        faults.missing(
            f"{_name(late[0])} never runs ({len(late)} of {len(due)} are missing). "
            "Each layer runs forward and, in training, backward exactly once for each "
            "microbatch of a step."
        )


def _check_keeps(position: int, instr: Forward, facts: Facts, faults: Faults) -> None:
    """A forward keeps residuals for its backward, and where none comes, none."""
    segment = facts.segments.get((instr.place, instr.segment))
    if segment is None or instr.grad == (facts.trains and segment.has_backward):
        return
    if facts.trains and instr.grad:
        faults.at(
            position,
            "It keeps residuals, and no backward reads them: neither its own "
            "parameters nor any before them train.",
        )
    faults.at(
        position,
        "Some forwards of this body keep residuals and some do not. A body "
        "trains or it evaluates.",
    )


def check_loads(program: Program, facts: Facts, faults: Faults) -> None:
    """Each microbatch of each replica is loaded once."""
    due = Counter(
        (r, m)
        for r, replica in enumerate(facts.plan.replicas)
        for m in range(replica.microbatches)
    )
    for position, instr in numbered(program):
        if isinstance(instr, Load):
            due[instr.replica, instr.microbatch] -= 1
            if due[instr.replica, instr.microbatch] < 0:
                faults.at(
                    position,
                    f"Replica r{instr.replica} loads microbatch {instr.microbatch} "
                    "once too often. The plan's microbatches are loaded once each.",
                )
    late = [load for load, count in due.items() if count]
    if late:
        replica, microbatch = late[0]
        faults.missing(
            f"Replica r{replica} never loads microbatch {microbatch}. The plan's "
            "microbatches are loaded once each."
        )


def _name(run: Run) -> str:
    way, place, segment, microbatch = run
    what = way if way == "forward" else f"backward, {way} part,"
    return f"The {what} of segment g{segment} of {place} for microbatch #{microbatch}"


def _unknown(run: Run, facts: Facts) -> str:
    _, place, segment, _ = run
    if (place, segment) not in facts.segments:
        known = [f"{p} g{g}" for p, g in facts.segments]
        return (
            f"The plan has no segment g{segment} of {place}; it has {', '.join(known)}."
        )
    return (
        f"{_name(run)} is none of the plan's: the replica has "
        f"{facts.microbatches[place]} microbatches, counted from 0, and an evaluation "
        "has no backward."
    )
