"""When instructions began, from when they were dispatched and seen to end."""

from typing import Any
from unittest import mock

import pytest

from hexijax.program.fuse import fused_pairs
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Forward, Free, Load, Reduce
from hexijax.runtime.engine import Engine
from hexijax.runtime.tracer import Tracer, _Seen
from tests.program.examples import make_chain, make_plan, make_stages

pytestmark = pytest.mark.usefixtures("backend")


def test_gradients_leave_when_the_backward_in_a_forward_has_made_them():
    """All is dispatched at once: what waits for nothing else waits for what it reads,
    and each way of copies for those before it."""
    plan = make_plan((make_stages([4]), 2), (make_stages([4]), 2))
    program = lower(plan, make_chain(4), rules=StepRules())
    pairs = fused_pairs(program)
    assert pairs, "forward and backward are one program"
    engine = mock.create_autospec(Engine, instance=True)
    engine.devices, engine.program = {}, program
    tracer = Tracer(engine)
    done = {id(pair) for pair in pairs.values()}
    tracer._seen = [
        _Seen(instruction=i, device="a/0", dispatched_s=0.0, end_s=float(end))
        for end, i in enumerate(program.body, 1)
        if not isinstance(i, Free | Load) and id(i) not in done
    ]
    events = tracer.events()
    forwards = [ran for ran in events if isinstance(ran.instruction, Forward)]
    assert all(ran.fused for ran in forwards)
    made_s = {
        (buffer.place, buffer.subject): ran.end_s
        for ran in forwards
        for buffer in pairs[_key(ran.instruction)].writes
    }
    left = [ran for ran in events if isinstance(ran.instruction, Reduce)]
    assert left
    for ran in left:
        reads = [(x.buffer.place, x.buffer.subject) for x in ran.instruction.reads]
        assert ran.start_s >= max(made_s[read] for read in reads if read in made_s)


def _key(i: Any) -> Any:
    return i.place, i.segment, i.microbatches
