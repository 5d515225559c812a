"""`hexijax simulate`: a plan's step on a timeline. No device is used.

arguments -> Study -> judge -> the table; trace.json for Perfetto, pictures
"""

import argparse

from hexijax.cli.choosing import GIVEN, OURS, search
from hexijax.cli.screen import Searching
from hexijax.cli.study import open_study
from hexijax.cli.telling import save_pictures, seconds_note
from hexijax.report.folder import write_json
from hexijax.report.judged import judge, with_events
from hexijax.report.summary import Report
from hexijax.report.timeline import describe
from hexijax.simulator import Timeline
from hexijax.simulator.trace import write_trace


def run_simulation(arguments: argparse.Namespace) -> int:
    """Simulates the plan given, or the one made; returns the exit code."""
    screen = Searching()
    study = open_study(arguments, screen.say)
    if study.plan:
        judged = judge(GIVEN, study.plan, study.problem)
    else:
        with screen.on("searching for the plan") as progress:
            judged = search(
                study.problem, OURS, seconds=arguments.seconds, progress=progress
            ).best
    with screen.on("drawing"):
        from hexijax.report.pictures import draw  # matplotlib takes a second

        played = with_events(judged, memory=True)
        drawn = draw(played)
    pictures = save_pictures(study.folder, drawn)
    trace = study.folder / "trace.json"
    write_trace(trace, played.timeline)
    if arguments.json:
        write_json(arguments.json, {**judged.figures(), **figures(played.timeline)})
    print(describe(judged.timeline))
    if not study.plan:
        seconds_note(arguments, print)
    print(f"pictures: {pictures}")
    print(f"saved as {trace}; open it at https://ui.perfetto.dev")
    return 0


def figures(timeline: Timeline) -> Report:
    """The timeline without its events."""
    return {
        "simulated_step_s": timeline.step_s,
        "busy_s": {d: dict(parts) for d, parts in timeline.busy_s.items()},
        "idle_s": {d: dict(parts) for d, parts in timeline.idle_s.items()},
        "link_bytes": dict(timeline.link_bytes),
        "host_s": dict(timeline.host_s),
        "simulated_peak_bytes_by_device": {
            device: curve.peak_bytes for device, curve in timeline.memory.items()
        },
    }
