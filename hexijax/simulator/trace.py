"""A Timeline as a file that Perfetto and chrome://tracing open."""

import json
from pathlib import Path
from typing import Any

from hexijax.simulator.timeline import Timeline

# The format: https://github.com/google/perfetto, "Trace Event Format".


def write_trace(file: Path, timeline: Timeline) -> None:
    """Writes one track a device and one a direction of each link."""
    queues = sorted({q for event in timeline.events for q, *_ in event.queues})
    track = {queue: i for i, queue in enumerate(queues)}
    names: list[dict[str, Any]] = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": i,
            "args": {"name": queue},
        }
        for queue, i in track.items()
    ]
    spans = [
        {
            "name": event.name,
            "cat": event.what,
            "ph": "X",
            "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6,
            "pid": 0,
            "tid": track[queue],
            "args": {"bytes": num_bytes} if num_bytes else {},
        }
        for event in timeline.events
        for queue, start_s, end_s, num_bytes in event.queues
    ]
    file.write_text(json.dumps({"traceEvents": names + spans}), encoding="utf-8")
