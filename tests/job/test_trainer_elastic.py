"""An elastic Trainer: nodes go while it fits, and it has one device's numbers."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hexijax import Trainer
from hexijax.data import RandomTokens
from hexijax.errors import UserError
from tests.job.test_trainer import CLUSTER, LOSS, PLAN, SIZE, batches, plain_losses

pytestmark = pytest.mark.usefixtures("backend")

STEPS = 5


@pytest.fixture(scope="module")
def params() -> Any:
    return jax.tree.map(np.asarray, LOSS.init(jax.random.key(5)))


def make(**fields: Any) -> Trainer:
    fields = {"plan": PLAN, "elastic": True, "cluster": CLUSTER, **fields}
    return Trainer(
        LOSS, fields.pop("params", None), optax.sgd(0.1, momentum=0.9), **fields
    )


def test_a_node_goes_while_it_fits(params: Any, tmp_path: Path, caplog: Any):
    want = plain_losses(params, batches(STEPS))
    own, found = make(params=params, batch_size=SIZE), dict[int, float]()
    own.prepare(next(batches(1)))
    job: Any = own._made("a job").now
    job._ahead.wait()  # from the first step on, and not from the first loss

    def then(line: Any) -> None:
        found[line["step"]] = line["loss"]
        if line["step"] == 2:
            own.members.lose("slow")

    data = RandomTokens(16, 4)
    saves = {"save": tmp_path, "neighbour_every": 1}
    assert own.fit(data, STEPS, callbacks=[then], **saves)
    assert [found[step] for step in range(STEPS)] == pytest.approx(want, rel=1e-5)
    assert own.steps_done == STEPS
    assert own.plan is not None
    used = {name for _, stage in own.plan.stages() for name in stage.devices}
    assert {name.partition("/")[0] for name in used} == {"fast"}
    assert "slow lost; the run goes on from step" in caplog.text
    assert "s (ahead), compiled in" in caplog.text
    assert (tmp_path / "members.txt").read_text().startswith("# node")
    assert "slow/" not in (tmp_path / "plan.txt").read_text()
    # Who resumes is the unbroken run, on the nodes that are there.
    again = make(elastic=["fast"], plan=None)
    again.resume(tmp_path)
    assert again.plan == own.plan
    assert own.fit(batches_from(STEPS), 1, callbacks=[then])
    last = found[STEPS]
    assert again.fit(data, 1, callbacks=[then])
    assert found[STEPS] == last
    assert again.steps_done == STEPS + 1


def batches_from(start: int) -> Any:
    iterator = RandomTokens(16, 4).batches(SIZE)
    for _ in range(start):
        next(iterator)
    return iterator


def test_what_cannot_be_elastic_is_refused():
    with pytest.raises(UserError, match="given a generator, which cannot be put back"):
        make().fit(batches(3), 3)
    with pytest.raises(UserError, match="elastic=True, and the plain program has one"):
        make(plan="single")
    with pytest.raises(UserError, match="has no node 'fats'"):
        make(elastic=["fats"])
    with pytest.raises(UserError, match="has no members: it stays on its cluster"):
        make(elastic=False).members  # noqa: B018
