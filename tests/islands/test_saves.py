"""What islands see of a run's saves, before any of them is forgotten."""

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from hexijax.errors import UserError
from hexijax.job.islands import check_left, check_seen
from hexijax.job.saving import nodes

RUN = Path("runs/x")


def test_islands_that_see_one_folder_go_on():
    check_seen({"a": 20, "b": 10}, RUN, resumes=True)
    check_seen({"a": 0, "b": 0}, RUN, resumes=False)  # lost before the first save
    check_left(10, 20, RUN)


def test_who_sees_no_save_begins_nothing_anew_that_would_remove_the_others():
    with pytest.raises(UserError, match="runs/x is whole for b; a sees step 20. Isl"):
        check_seen({"a": 20, "b": 0}, RUN, resumes=False)
    with pytest.raises(UserError, match="whole for a, b; nobody sees one."):
        check_seen({"a": 0, "b": 0}, RUN, resumes=True)


def test_a_run_that_is_done_is_not_resumed():
    with pytest.raises(UserError, match="has done 20 steps already and 20 were asked"):
        check_left(20, 20, RUN)


def test_what_lies_in_the_host_s_memory_is_the_island_s_own():
    """On an island of cards the first CPU device stands for another island's card."""
    host, mine = jax.devices()[:2]
    engine = SimpleNamespace(
        cluster=SimpleNamespace(device=lambda name: SimpleNamespace(node=name)),
        devices={"other": host, "own": mine},
        layout=SimpleNamespace(carrier=SimpleNamespace(here=lambda x: x is mine)),
    )
    assert nodes(engine) == {mine: "own", host: "own"}
