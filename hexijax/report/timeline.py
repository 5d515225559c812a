"""A Timeline as a table: what each device does all step, and why it waits."""

from collections.abc import Iterator, Sequence

from hexijax.simulator import Cause, Timeline
from hexijax.simulator.tasks import What

BUSY = (What.FORWARD, What.BACKWARD, What.BOTH, What.SYNC, What.UPDATE)
IDLE = (Cause.PIPELINE, Cause.MOVE, Cause.SYNC, Cause.DISPATCH)


def describe(timeline: Timeline) -> str:
    """The step, a line a device, and the busiest links; no line break at the end."""
    return "\n".join(_lines(timeline))


def _lines(timeline: Timeline) -> Iterator[str]:
    step_s = timeline.step_s
    yield f"step {step_s * 1e3:.4g} ms simulated; parts of it:"
    yield from columns(
        [
            (
                "device",
                "busy",
                *BUSY,
                "| idle",
                *(f"{cause}" for cause in IDLE),
            ),
            *(
                (
                    device,
                    f"{timeline.utilisation(device):.0%}",
                    *(_part(busy.get(what), step_s) for what in BUSY),
                    f"| {1 - timeline.utilisation(device):.0%}",
                    *(
                        _part(timeline.idle_s[device].get(cause), step_s)
                        for cause in IDLE
                    ),
                )
                for device, busy in timeline.busy_s.items()
            ),
        ]
    )
    for host, seconds in timeline.host_s.items():
        yield f"host of {host}: {seconds / step_s:.0%} of the step to dispatch it"
    busiest = sorted(timeline.link_bytes.items(), key=lambda item: -item[1])[:3]
    for link, num_bytes in busiest:
        if num_bytes:
            yield f"{link}: {num_bytes / 1e6:.4g} MB a step"


def _part(seconds: float | None, step_s: float) -> str:
    return "." if not seconds else f"{seconds / step_s:.0%}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines whose cells stand under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
