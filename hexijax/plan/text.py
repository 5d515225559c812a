"""A plan as text that a person reads, edits by hand, and runs.

    Plan -> render -> plan.txt -> an editor -> parse -> Plan

A line a fact: a heading, a line for each replica, stage and state share, and what was
predicted. Every value stands behind its name, so the order of a line's fields is free.
Left out: ``lanes`` and ``tensor`` are 1, ``segments`` is the whole stage, ``remat`` is
none, ``params`` are kept, ``waits``, ``residuals``, a state's ``memory`` and its
``update`` are the device, ``grads`` and ``leaving`` are 0, ``order`` is fifo, ``chunk``
is ``CHUNK_SIZE``, ``samples`` fills every microbatch.
'#' starts a comment. ``docs`` of each key lie with the field it sets, in ``plan.plan``.
"""

import enum
from collections.abc import Iterator, Sequence
from pathlib import Path

from hexijax.layers.chain import Chain
from hexijax.plan.names import fold, quote
from hexijax.plan.parse import parse
from hexijax.plan.plan import (
    CHUNK_SIZE,
    FORMAT_VERSION,
    Memory,
    Params,
    Plan,
    PlanError,
    Prediction,
    Replica,
    Stage,
    StateShare,
    UpdateOrder,
)

__all__ = ["parse", "read", "render"]


def render(plan: Plan, chain: Chain | None = None) -> str:
    """The plan as text; ``parse`` undoes it exactly.

    With a chain, a comment behind each stage names its layers.
    """
    blocks = [
        [f"hexijax plan {FORMAT_VERSION}"],
        list(_settings(plan)),
        *(_replica(r, replica, chain) for r, replica in enumerate(plan.replicas)),
        [_state(share) for share in plan.state],
        list(_prediction(plan.prediction)) if plan.prediction else [],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def read(path: Path) -> Plan:
    """The plan in a text file.

    Raises:
      PlanError: no such file, not text, or not a plan.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise PlanError(
            f"Cannot read the plan {path}: {error.strerror}. `hexijax plan EXPERIMENT` "
            "writes one."
        ) from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"The plan {path} is not UTF-8 text: byte {error.start} is "
            f"{error.object[error.start]:#04x}. Write one with `hexijax plan`."
        ) from None
    return parse(text, source=path.name)


def _settings(plan: Plan) -> Iterator[str]:
    yield f"objective   {quote(plan.objective)}"
    yield f"batch       {plan.batch_size}"
    yield f"schedule    {plan.schedule}"
    yield f"reductions  {plan.reductions}"
    if plan.order is not UpdateOrder.FIFO:
        yield f"order       {plan.order}"
    if plan.chunk != CHUNK_SIZE:
        yield f"chunk       {plan.chunk}"
    if plan.cluster:
        yield f"cluster     {quote(plan.cluster)}"
    if plan.chain:
        yield f"chain       {quote(plan.chain)}"


def _replica(r: int, replica: Replica, chain: Chain | None) -> list[str]:
    head = (
        f"replica {r}  microbatches {replica.microbatches}  "
        f"size {replica.microbatch_size}  samples {replica.samples}"
    )
    rows = [_stage_fields(s, stage) for s, stage in enumerate(replica.stages)]
    if any(stage.params for stage in replica.stages):
        for row, stage in zip(rows, replica.stages, strict=True):
            params = stage.params or (Params.KEPT,) * len(stage.segments)
            row.append(f"params {_runs(params, len(stage.segments))}")
    if any(stage.waits for stage in replica.stages):
        for row, stage in zip(rows, replica.stages, strict=True):
            waits = stage.waits or (Memory.DEVICE,) * len(stage.segments)
            row.append(f"waits {_runs(waits, len(stage.segments))}")
    if any(stage.residuals for stage in replica.stages):
        for row, stage in zip(rows, replica.stages, strict=True):
            kept = stage.residuals or (Memory.DEVICE,) * len(stage.segments)
            row.append(f"residuals {_runs(kept, len(stage.segments))}")
    if any(stage.grads for stage in replica.stages):
        for row, stage in zip(rows, replica.stages, strict=True):
            row.append(f"grads {stage.grads}")
    if any(stage.leaving for stage in replica.stages):
        for row, stage in zip(rows, replica.stages, strict=True):
            row.append(f"leaving {stage.leaving}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [head]
    for row, stage in zip(rows, replica.stages, strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        note = _layer_names(stage, chain) if chain else ""
        lines.append(f"  {'  '.join(cells)}{note}".rstrip())
    return lines


def _stage_fields(s: int, stage: Stage) -> list[str]:
    first, stop = stage.layers
    return [
        f"stage {s}",
        f"devices {fold(stage.devices)}",
        f"lanes {stage.lanes}",
        f"tensor {stage.tensor}",
        f"dtype {quote(stage.dtype)}",
        f"layers {first}-{stop - 1}",
        f"segments {'+'.join(map(str, stage.segments))}",
        f"remat {_runs(stage.remat, stage.num_layers)}",
    ]


def _layer_names(stage: Stage, chain: Chain) -> str:
    names = [layer.name for layer in chain.layers[slice(*stage.layers)]]
    if not names:
        return ""
    return f"  # {names[0]}" + (f" ... {names[-1]}" if len(names) > 1 else "")


def _runs(choices: Sequence[enum.StrEnum], number: int) -> str:
    """``none`` for all layers or segments, else runs: ``none*3,full``."""
    if len(choices) == number and len(set(choices)) == 1:
        return choices[0].value
    runs: list[tuple[enum.StrEnum, int]] = []
    for choice in choices:
        if runs and runs[-1][0] == choice:
            runs[-1] = (choice, runs[-1][1] + 1)
        else:
            runs.append((choice, 1))
    # A lone run is counted, else it would read as the choice of all.
    return ",".join(
        choice.value if count == 1 and len(runs) > 1 else f"{choice.value}*{count}"
        for choice, count in runs
    )


def _state(share: StateShare) -> str:
    shares = ", ".join(
        f"{quote(place)}={float(part)!r}" for place, part in share.shares.items()
    )
    groups = "*" if share.groups == ("*",) else fold(share.groups)
    where = [
        f"  {name} {memory}"
        for name, memory in (("memory", share.memory), ("update", share.update))
        if memory is not Memory.DEVICE
    ]
    return f"state {groups}  {shares or 'even'}{''.join(where)}"


def _prediction(prediction: Prediction) -> Iterator[str]:
    yield f"predicted step_s {float(prediction.step_s)!r}"
    by_bytes: dict[int, list[str]] = {}
    for device, num_bytes in prediction.memory_bytes.items():
        by_bytes.setdefault(num_bytes, []).append(device)
    for num_bytes, devices in by_bytes.items():
        yield f"predicted memory_bytes {num_bytes}  devices {fold(devices)}"
