"""Pictures of a plan: who holds what, when, and how full; equal devices drawn once.

    Judged -> draw -> {"plan": PNG, "timeline": PNG, "memory": PNG, "held": PNG}

matplotlib is imported here and nowhere else; it draws to memory (Agg), never to a
screen.
"""

from collections.abc import Sequence

from hexijax.report.judged import Judged, with_events
from hexijax.report.pictures.curves import draw_curves
from hexijax.report.pictures.machines import draw_machines
from hexijax.report.pictures.memory import draw_memory
from hexijax.report.pictures.side import draw_side_by_side
from hexijax.report.pictures.style import png
from hexijax.report.pictures.timeline import draw_timeline

__all__ = ["compared", "draw"]


def draw(judged: Judged) -> dict[str, bytes]:
    """The pictures of one plan, by name; played unless it was, memory looked at."""
    timeline = judged.timeline
    if not (timeline.events and timeline.memory):
        judged = with_events(judged, memory=True)
    return {
        "plan": png(draw_machines(judged)),
        "timeline": png(draw_timeline(judged)),
        "memory": png(draw_memory(judged)),
        "held": png(draw_curves(judged)),
    }


def compared(rows: Sequence[Judged]) -> bytes:
    """The timelines of several plans on one axis."""
    return png(draw_side_by_side([with_events(row) for row in rows]))
