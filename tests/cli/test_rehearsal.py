"""Programs of plans ahead are compiled beside the run, once each, and it says so."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hexijax.cli import rehearsal
from hexijax.cli.rehearsal import Asked, Rehearsals
from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.job.intake import plan_options, trace_chain
from hexijax.planner import make_plan
from tests.cli import tiny

pytestmark = pytest.mark.usefixtures("backend")

CLUSTER = Cluster.from_toml("experiments/clusters/quickstart.toml")
ASKED = Asked(
    experiment=Path(tiny.__file__),
    settings={"rate": 0.02},
    cluster=CLUSTER,
    emulate=True,
)
FAST = CLUSTER.without("slow")


@pytest.fixture(scope="module")
def plan() -> Any:
    experiment: Experiment = tiny.experiment()
    options = plan_options(experiment)
    return make_plan(trace_chain(experiment), FAST, batch_size=8, options=options)


def answers(*given: Any) -> Any:
    """What reads these, and then nothing more."""
    found: Iterator[Any] = iter(given)

    def read() -> Any:
        for each in found:
            return each
        raise EOFError

    return read


def test_a_plan_is_run_for_a_step_where_there_is_room(plan: Any, monkeypatch: Any):
    said: list[bool] = []
    rehearsal.serve(answers(ASKED, (FAST, plan)), said.append)
    monkeypatch.setattr(rehearsal, "available_bytes", lambda: 0)
    rehearsal.serve(answers(ASKED, (FAST, plan)), said.append)
    assert said == [True, False]
    assert rehearsal.can_rehearse(CLUSTER, emulate=False)


def test_each_plan_is_compiled_once_and_what_dies_is_borne(plan: Any, monkeypatch: Any):
    answer = "import pickle, sys; pickle.dump(True, sys.stdout.buffer)"

    def once(self: Rehearsals) -> Any:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", answer], stdin=pipe, stdout=pipe)

    monkeypatch.setattr(Rehearsals, "_start", once)
    said: list[str] = []
    rehearsals = Rehearsals(ASKED, said.append, after_s=0)
    rehearsals.rehearse(FAST, plan)
    rehearsals.rehearse(FAST, plan)
    rehearsals.rehearse(CLUSTER.without("fast"), plan)
    assert rehearsals._thread is not None
    rehearsals._thread.join(60)  # the process answers once and is gone
    compiled, died = said
    assert compiled.startswith("compiled ahead in ")
    assert compiled.endswith("the plan without slow")
    assert "plans are not compiled ahead any more: the process that does it" in died
    rehearsals.close()
    began = time.monotonic()
    waiting = Rehearsals(ASKED, said.append)
    waiting.rehearse(FAST, plan)
    waiting.close()  # before the first begins
    assert time.monotonic() - began < rehearsal.AFTER_S / 2
