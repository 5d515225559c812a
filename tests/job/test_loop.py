"""The loop: one step late, exact positions, and whole after whatever ends it."""

import contextlib
import dataclasses
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hexijax.errors import UserError
from hexijax.experiment import Batch, Experiment
from hexijax.job.loop import MAX_SKIPPED, Diverged, Loop
from hexijax.job.screen import Screen
from hexijax.plan.precision import LEAST_SCALE
from hexijax.report import Meter, Metrics
from hexijax.report.metrics import read_metrics

NAN = float("nan")


@dataclasses.dataclass
class Count:
    """Batches that are their own number."""

    at: int = 0
    end: int | None = None

    def batches(self, batch_size: int) -> "Count":
        return Count(end=self.end)

    def fingerprint(self) -> str:
        return "count"

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        return {"n": np.asarray([self.at - 1])}

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]


@dataclasses.dataclass
class Step:
    fetch: Callable[[], dict[str, float]]


class Engine:
    """Its loss is the number of the batch unless told; it logs what is asked of it."""

    def __init__(self, losses: dict[int, float] | None = None, finite: float = 1.0):
        self.log: list[str] = []
        self.losses, self.finite = losses or {}, finite
        self.scale: Callable[[int], float] | None = None

    def step(self, batch: Batch, step: int) -> Step:
        assert batch["n"][0] == step
        self.log.append(f"step {step}")

        def fetch() -> dict[str, float]:
            self.log.append(f"fetch {step}")
            loss = self.losses.get(step, float(step))
            return {
                "loss": loss,
                "grad_norm": 1.0,
                "weight": 8.0,
                "finite": self.finite,
                **({"scale": self.scale(step)} if self.scale else {}),
            }

        return Step(fetch)

    def sums(self, batch: Batch, number: int) -> dict[str, tuple[float, float]]:
        self.log.append(f"evaluate {number}")
        (n,) = batch["n"]
        assert n == number
        return {"loss": (n * (1 + 2 * n), 1 + 2 * n), "own": (3.0, 1.0 + n)}


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    with contextlib.ExitStack() as stack:

        def make(engine: Engine, **fields: Any) -> Loop:
            metrics = Metrics(tmp_path / "metrics.jsonl")
            stack.callback(metrics.close)
            return new_loop(metrics, engine, **fields)

        yield make


def new_loop(metrics: Metrics, engine: Engine, **fields: Any) -> Loop:
    saves = fields.pop("save", None)
    every = fields.pop("save_every", 0)
    batches = Count(end=fields.pop("end", None))
    screen = fields.pop("screen", None) or Screen(Console(file=io.StringIO()))
    return Loop(
        engine=engine,
        experiment=Experiment(loss=None, **fields),
        batches=batches,
        meter=Meter(tokens_per_step=1.0, flops_per_step=1.0, peak_flops_per_s=None),
        screen=screen,
        write=metrics.write,
        save=saves and (lambda step: saves(step, batches.get_state())),
        save_every=every,
    )


def test_a_step_is_dispatched_before_the_last_one_is_fetched(tmp_path: Path, make_loop):
    engine = Engine()
    assert make_loop(engine, steps=3).run()
    assert engine.log == ["step 0", "step 1", "fetch 0", "step 2", "fetch 1", "fetch 2"]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert set(lines[0]) >= {"loss", "grad_norm", "tokens_per_s", "mfu", "step_s"}


@pytest.mark.parametrize("start", [0, 2])
def test_a_loop_has_started_when_its_first_step_is_on_its_way(make_loop, start: int):
    engine = Engine()
    loop = make_loop(engine, steps=4)
    loop.batches.set_state({"at": start})
    loop.started = lambda: engine.log.append("started")
    assert loop.run(start)
    assert engine.log[:2] == [f"step {start}", "started"]
    assert engine.log.count("started") == 1


def test_saves_know_the_steps_done_and_the_data_read(tmp_path: Path, make_loop):
    saved: list[Any] = []
    save = lambda *args: saved.append(args)  # noqa: E731
    make_loop(Engine(), steps=5, save=save, save_every=2).run()
    assert saved == [(2, {"at": 2}), (4, {"at": 4}), (5, {"at": 5})]


def test_a_paused_loop_leaves_state_and_data_at_the_steps_done(make_loop):
    engine, saved = Engine(), list[Any]()
    loop = make_loop(engine, steps=5, save=lambda *args: saved.append(args))
    loop.pause = lambda done: done == 3 and not loop.paused
    assert not loop.run()
    assert (loop.paused, loop.done, loop.batches.at, saved) == (True, 3, 3, [])
    assert engine.log[-1] == "fetch 2"
    loop.pause = None
    assert loop.run(3)
    assert saved == [(5, {"at": 5})]


def test_evaluation_is_a_mean_by_weight_over_the_same_batches(
    tmp_path: Path, make_loop
):
    engine = Engine()
    loop = make_loop(engine, steps=4, eval_every=2, eval_batches=2, eval_data=Count())
    loop.run()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line.get("eval_loss") for line in lines] == [None, 0.75, None, 0.75]
    # A metric with a weight of its own is divided by that, not by the loss's.
    assert [line.get("eval_own") for line in lines] == [None, 2.0, None, 2.0]
    assert engine.log.index("fetch 1") < engine.log.index("evaluate 1")
    for field, says in [("eval_every", "set eval_every=0"), ("eval_ends", "=False")]:
        with pytest.raises(UserError, match=f"there is no eval_data .*{says}"):
            Experiment(loss=None, **{field: 1 if field == "eval_every" else True})


def test_evaluation_before_the_first_step_and_after_the_last(tmp_path: Path, make_loop):
    engine = Engine()
    make_loop(
        engine, steps=3, eval_every=2, eval_ends=True, eval_batches=1, eval_data=Count()
    ).run()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["step"], "eval_loss" in line, "loss" in line) for line in lines] == [
        (-1, True, False),
        (0, False, True),
        (1, True, True),
        (2, True, True),
    ]
    assert engine.log[0] == "evaluate 0"
    assert engine.log[-1] == "evaluate 0"
    report = Metrics(tmp_path / "metrics.jsonl", continue_at=9)
    assert (report.steps, report.first_loss, report.last_loss) == (3, 0.0, 2.0)
    report.close()


def test_evaluation_data_that_ends_is_evaluated_whole(
    tmp_path: Path, make_loop, capsys
):
    make_loop(Engine(), steps=4, eval_every=2, eval_data=Count(end=3)).run()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines[1]["eval_loss"] == lines[3]["eval_loss"] == (0 + 3 + 10) / (1 + 3 + 5)
    assert (
        capsys.readouterr().out.count(
            "The evaluation's data ended after 3 of 8 batches: all its 3 samples are "
            "evaluated each time."
        )
        == 1
    )  # said once
    with pytest.raises(UserError, match="data ended before its first"):
        make_loop(Engine(), steps=4, eval_every=2, eval_data=Count(end=0)).run()


def test_data_that_ends_early_is_told_and_what_was_done_stands(
    tmp_path: Path, make_loop
):
    saved: list[Any] = []
    loop = make_loop(
        Engine(),
        steps=9,
        end=5,
        save=lambda *args: saved.append(args),
        save_every=4,
    )
    with pytest.raises(
        UserError,
        match=r"The data ended after 5 batches, and 9 steps were asked for\. The first "
        r"5 steps of the run are done and stand\. Give data that starts over",
    ):
        loop.run()
    assert saved == [(4, {"at": 4}), (5, {"at": 5})]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5


def test_ctrl_c_lets_the_step_end_and_saves_if_asked(tmp_path: Path, make_loop):
    class Interrupted(Engine):
        def step(self, batch: Batch, step: int) -> Step:
            if step == 2:
                signal.raise_signal(signal.SIGINT)
            return super().step(batch, step)

    before = signal.getsignal(signal.SIGINT)
    saved: list[Any] = []
    loop = make_loop(
        Interrupted(),
        steps=9,
        save=lambda *args: saved.append(args),
        save_every=5,
    )
    assert not loop.run()
    assert saved == [(3, {"at": 3})]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert signal.getsignal(signal.SIGINT) == before


def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(tmp_path: Path, make_loop):
    saved: list[Any] = []
    loop = make_loop(
        Engine({3: NAN}),
        steps=9,
        save=lambda *args: saved.append(args),
        save_every=4,
    )
    with pytest.raises(
        Diverged, match=r"The loss of step 3 is nan\. Try --set clip_nor"
    ):
        loop.run()
    assert saved == []  # step 4 would have been saved
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    with pytest.raises(Diverged, match=r"gradient of step 0 is not finite \(loss 0\)"):
        make_loop(Engine(finite=0.0), steps=9).run()
    for fields in ({}, {"skip_nonfinite": True}):
        with pytest.raises(Diverged, match=r" rate.*, --set loss_scale=dynamic, "):
            make_loop(Engine(finite=0.0), steps=99, loss_scale=64.0, **fields).run()


def test_skipped_steps_are_borne_for_a_while(tmp_path: Path, make_loop):
    some = Engine(dict.fromkeys(range(3, 3 + MAX_SKIPPED - 1), NAN))
    assert make_loop(some, steps=40, skip_nonfinite=True).run()
    with pytest.raises(Diverged, match=f"{MAX_SKIPPED} steps in a row were skipped"):
        make_loop(Engine(finite=0.0), steps=99, skip_nonfinite=True).run()


def test_steps_that_look_for_a_loss_scale_are_not_counted(make_loop):
    engine = Engine(finite=0.0)
    engine.scale = lambda step: max(2.0 ** (24 - step), LEAST_SCALE)
    with pytest.raises(
        Diverged,
        match=rf"gradient of step {23 + MAX_SKIPPED} is not finite \(loss \d+\)\. "
        rf"{MAX_SKIPPED} steps in a row were skipped, the last at a loss scale of 1\. "
        "Try a smaller learning rate, --set dtype=float32, or look at the data",
    ):
        make_loop(engine, steps=99).run()
    # A loss that is not finite has nothing to do with the scale.
    engine = Engine(dict.fromkeys(range(99), NAN))
    engine.scale = lambda step: 2.0**16
    with pytest.raises(Diverged, match=f"loss of step {MAX_SKIPPED - 1} is nan"):
        make_loop(engine, steps=99).run()
