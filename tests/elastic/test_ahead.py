"""Plans are there before they are needed, and are the plans the search would make."""

import dataclasses
import os
import signal

import pytest

from hexijax.elastic.ahead import Asked, PlansAhead, losses
from hexijax.planner import PlanOptions
from tests.elastic.examples import four
from tests.plan.examples import make_chain

CLUSTER = four().without("d")
ASKED = Asked(
    chain=make_chain(1), batch_size=8, dtype="float32", options=PlanOptions(moments=1)
)


def test_the_loss_of_each_node_is_planned_for_ahead():
    left = losses(CLUSTER)
    assert [[node.name for node in c.nodes] for c in left] == [
        *(["b", "c"], ["a", "c"], ["a", "b"])
    ]
    assert losses(left[0].without("b")) == []
    with PlansAhead(ASKED) as ahead:
        assert not ahead.ready(left[0])
        ahead.prepare(left[:1])
        ahead.wait()
        assert ahead.ready(left[0])
        found = ahead.get(left[0])
        assert found.ahead
        assert found.seconds < 0.1
        assert found.plan == ASKED.plan(left[0])
        # What dies is started again, and what was not asked for is found all the same.
        assert ahead._process is not None
        os.kill(ahead._process.pid, signal.SIGKILL)
        ahead._process.wait()
        ahead.prepare(left)
        ahead.wait()
        assert ahead.get(left[2]).ahead
        alone = left[0].without("b")
        assert not ahead.get(alone).ahead
        assert ahead.get(alone).ahead
        process = ahead._process
    assert process.returncode is not None


def test_what_fits_nowhere_is_said_when_it_is_needed():
    asked = dataclasses.replace(
        ASKED, chain=make_chain(1), options=PlanOptions(layers_per_stage=((1, 1),))
    )
    with PlansAhead(asked, background=False) as ahead:
        ahead.prepare([CLUSTER])
        with pytest.raises(ValueError, match="The split 1\\+1 was asked for"):
            ahead.get(CLUSTER)
