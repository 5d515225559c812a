"""A Timeline as a table: what each device does all step, and why it waits."""

from collections.abc import Iterator

from hexijax.report.rows import group
from hexijax.report.words import columns, seconds
from hexijax.simulator import Cause, Timeline
from hexijax.simulator.uses import What

BUSY = (What.FORWARD, What.BACKWARD, What.BOTH, What.SYNC, What.UPDATE)
IDLE = (Cause.PIPELINE, Cause.MOVE, Cause.SYNC, Cause.DISPATCH)


def describe(timeline: Timeline) -> str:
    """The step, a line a device (equal ones share it), and the busiest links."""
    return "\n".join(_lines(timeline))


def _lines(timeline: Timeline) -> Iterator[str]:
    step_s = timeline.step_s
    yield f"step {seconds(step_s)} simulated; parts of it:"
    idle = (f"{cause}" for cause in IDLE)
    rows = [("device", "busy", *BUSY, "| idle", *idle)]
    cells = {device: _cells(timeline, device) for device in timeline.busy_s}
    rows += [
        (row.label, *cells[row.devices[0]])
        for row in group(list(cells), key=lambda device: cells[device])
    ]
    yield from columns(rows)
    for host, time_s in timeline.host_s.items():
        if time_s > step_s / 100:
            yield f"host of {host}: {time_s / step_s:.0%} of the step to dispatch it"
    busiest = sorted(timeline.link_bytes.items(), key=lambda item: -item[1])[:3]
    for link, num_bytes in busiest:
        if num_bytes:
            yield f"{link}: {num_bytes / 1e6:.4g} MB a step"


def _cells(timeline: Timeline, device: str) -> tuple[str, ...]:
    """A device's row; equal devices have equal ones."""
    busy, idle = timeline.busy_s[device], timeline.idle_s[device]
    used = timeline.utilisation(device)
    return (
        f"{used:.0%}",
        *(_part(busy.get(what), timeline.step_s) for what in BUSY),
        f"| {1 - used:.0%}",
        *(_part(idle.get(cause), timeline.step_s) for cause in IDLE),
    )


def _part(seconds: float | None, step_s: float) -> str:
    return "." if not seconds else f"{seconds / step_s:.0%}"
