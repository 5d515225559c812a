"""What an island makes of a step that failed, and of a save that says too little."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hexijax.errors import UserError
from hexijax.islands.member import Member
from hexijax.islands.rendezvous import Rendezvous
from hexijax.islands.world import IslandLost
from hexijax.job.intake import trace_chain
from hexijax.job.islands import Islanded
from hexijax.job.saving import position
from hexijax.report import RunFolder
from hexijax.weights.stored.manifest import Stand
from tests.cli.tiny import experiment
from tests.islands.nearby import all_at_once

NAMES = ("a", "b")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("lost", [True, False])
def test_a_failed_step_is_explained_by_a_loss_that_is_known_only_later(
    tmp_path: Path, lost: bool
):
    """The launcher learns of it after a silence; until then the fault might be ours."""
    silence_s = 1.0
    meeting = Rendezvous(NAMES, run="test", silence_s=silence_s)
    meeting.brief({"wait_s": 5.0, "pull_s": 5.0, "silence_s": silence_s})
    members = {
        name: Member.connect(meeting.address, name, token=meeting.token, seconds=5.0)
        for name in NAMES
    }
    a, _ = all_at_once(
        [
            lambda m=m: (
                m.join(
                    m.welcome(-1, 5.0), address="h:1", facts={}, seconds=5.0, pull_s=5.0
                ),
                m,
            )
            for m in members.values()
        ]
    )
    trained = experiment()
    fields: dict[str, Any] = {"facts": {}, "emulate": True, "say": print}
    island = Islanded(
        member=members["a"],
        welcome=members["a"].welcome(-1, 5.0),
        start_server=lambda: None,
        experiment=trained,
        chain=trace_chain(trained),
        folder=RunFolder(tmp_path),
        progress=lambda what, done, total: None,
        **fields,
    )
    assert a[0].islands == NAMES
    if lost:  # as the launcher would, once b has been silent for long enough
        seconds = silence_s + 1.0
        threading.Timer(seconds, lambda: meeting.lose("b", "it said nothing")).start()
    began = time.monotonic()
    failure = RuntimeError("INTERNAL: a transfer broke")
    with pytest.raises(IslandLost if lost else RuntimeError) as raised:
        island._explain(failure)
    if lost:
        assert "Island 'b' is lost: the step at hand" in str(raised.value)
        assert "a transfer broke" in str(raised.value)
        assert time.monotonic() - began >= silence_s + 0.5
    else:
        assert raised.value is failure
    for member in members.values():
        member.leave(0)
    meeting.close()


def test_a_save_without_the_position_of_its_data_is_not_gone_on_from():
    run = Path("runs/x")
    assert position(Stand(step=3, data_state={"at": 3}), run) == {"at": 3}
    with pytest.raises(UserError, match="runs/x was saved without the position of its"):
        position(Stand(step=3, data_state=None), run)
