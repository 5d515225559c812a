"""Uneven data parallelism: layers outside, microbatches inside.

The same laws as of any plan, on plans that only such a schedule makes.
"""

from typing import Any

import pytest

from hexijax.plan.plan import Schedule
from tests.laws.cases import check, draw, run


@pytest.mark.parametrize("seed", [71, 125])
def test_ministages_of_several_segments_give_the_plain_program_s_numbers(
    seed: int, monkeypatch: Any
):
    case = draw(seed, Schedule.LAYERED)
    (replica,) = case.plan.replicas
    sets = [stage.devices for stage in replica.stages]
    assert len(set(sets)) < len(sets)
    assert max(len(stage.segments) for stage in replica.stages) > 1
    assert replica.microbatches > 2
    check(case, run(case, monkeypatch))
