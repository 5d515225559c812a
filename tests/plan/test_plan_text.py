"""A plan's text: by eye, by law, and what it says about slips."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.layers.chain import Remat
from hexijax.plan.plan import (
    Place,
    Plan,
    PlanError,
    Prediction,
    Replica,
    Stage,
    StateShare,
)
from hexijax.plan.text import parse, read, render
from tests.plan.random_plans import random_plan

UNEVEN = Plan(
    replicas=(
        Replica(
            stages=(
                Stage(
                    devices=("fast/0", "fast/1", "fast/2", "fast/3"),
                    layers=(0, 4),
                    lanes=2,
                    tensor=2,
                    dtype="bfloat16",
                    segments=(2, 2),
                    remat=(Remat.NONE, Remat.NONE, Remat.NONE, Remat.FULL),
                ),
                Stage(devices=("slow/0",), layers=(4, 6)),
            ),
            microbatches=6,
            microbatch_size=8,
            samples=44,
        ),
        Replica(
            stages=(Stage(devices=("slow/3", "slow/1"), layers=(0, 6), lanes=2),),
            microbatches=5,
            microbatch_size=4,
            samples=20,
        ),
    ),
    batch_size=64,
    state=(
        StateShare(groups=("*",), shares={}),
        StateShare(
            groups=("embed", "blocks/0", "blocks/1"),
            shares={Place("r0.s0"): 0.75, Place("slow/2"): 0.25},
        ),
    ),
    chain="0123456789ab",
    cluster="ba9876543210",
    prediction=Prediction(
        step_s=0.0125,
        memory_bytes={"fast/0": 5, "fast/1": 5, "slow/0": 7},
    ),
)

GOLDEN = """\
hexijax plan 1

objective   step_time
batch       64
schedule    1f1b
reductions  exact
cluster     ba9876543210
chain       0123456789ab

replica 0  microbatches 6  size 8  samples 44
  stage 0  devices fast/0-3  lanes 2  tensor 2  dtype bfloat16  layers 0-3  segments 2+2  remat none*3,full
  stage 1  devices slow/0    lanes 1  tensor 1  dtype float32   layers 4-5  segments 2    remat none

replica 1  microbatches 5  size 4  samples 20
  stage 0  devices slow/3,slow/1  lanes 2  tensor 1  dtype float32  layers 0-5  segments 6  remat none

state *  even
state embed,blocks/0-1  r0.s0=0.75, slow/2=0.25

predicted step_s 0.0125
predicted memory_bytes 5  devices fast/0-1
predicted memory_bytes 7  devices slow/0
"""  # noqa: E501


def test_a_plan_reads_like_this():
    assert render(UNEVEN) == GOLDEN
    assert parse(GOLDEN) == UNEVEN


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_every_plan_prints_and_parses_back_equal(seed: int):
    plan = random_plan(seed)
    assert parse(render(plan)) == plan


def test_what_goes_without_saying_may_be_left_out():
    plan = parse("""
        hexijax plan 1     # written at night
        batch 12
        replica 0  size 4  microbatches 3
        stage 0  layers 0-1  devices a/0, a/1
        stage 1  layers 2  devices a/2
    """)
    assert plan == Plan(
        replicas=(
            Replica(
                stages=(
                    Stage(devices=("a/0", "a/1"), layers=(0, 2)),
                    Stage(devices=("a/2",), layers=(2, 3)),
                ),
                microbatches=3,
                microbatch_size=4,
                samples=12,
            ),
        ),
        batch_size=12,
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "lanes 2  tensor 2",
            "lanes 2x  tensor 2",
            "plan, line 11: expected a whole number for lanes, found '2x'.",
        ),
        (
            "lanes 2  tensor 2",
            "lanes 2  tensors 2",
            "expected one of: devices, lanes, tensor, dtype, layers, segments, remat, "
            "params, waits, residuals, grads, leaving, found 'tensors'. Did you mean "
            "'tensor'?",
        ),
        (
            "lanes 2  tensor 2",
            "lanes 2  lanes 2",
            "expected 'lanes' once, found 'lanes'.",
        ),
        ("layers 0-3", "layers 3-0", "expected a range of layers upwards"),
        ("layers 0-3", "", "line 11: expected 'layers' of the stage, found the end"),
        ("layers 0-3", "layers 0-999999", "expected layers below 100000"),
        ("fast/0-3", "fast/3-0", "expected a range upwards, such as fast/0-3, found"),
        ("fast/0-3", "fast/0-999999", "expected a range of at most 100000 devices"),
        (
            "none*3,full",
            "none*3,ful",
            "one of none, dots, full, found 'ful'. Did you mean",
        ),
        ("none*3,full", "none*x,full", "a remat policy such as none, or none*3,full"),
        ("2+2", "2-2", "expected segments such as 2+2, found '2-2'"),
        ("batch       64", "batch       -64", "for the global batch size, found '-64'"),
        ("batch       64\n", "", "has no 'batch' line. The stages take 64 samples"),
        (
            "1f1b",
            "1f2b",
            "zero-bubble, eager-1f1b, layered, found '1f2b'. Did you",
        ),
        ("objective", "objectve", "found 'objectve'. Did you mean 'objective'?"),
        ("objective", "batch 3\nobjective", "expected 'batch' once"),
        ("hexijax plan 1", "hexijax plan 2", "expected format version 1, the one this"),
        ("hexijax plan 1", "hexijax plot 1", "expected the header 'hexijax plan 1'"),
        ("replica 1", "replica 2", "expected replica 1: they are numbered in order"),
        ("  stage 1", "  stage 2", "expected stage 1: they are numbered in order"),
        ("replica 0  ", "#", "expected a 'replica' line before the first stage"),
        ("r0.s0=0.75", "r0.s0", "expected '=' and the share of that place, found ','"),
        ("r0.s0=0.75", "r0.s0=-1", "expected a number from 0 for the share of r0.s0"),
        ("slow/2=0.25", "r0.s0=0.25", "expected the share of r0.s0 once"),
        ("step_s 0.0125", "step_s 1e999", "expected a number from 0 for step_s"),
        (
            "predicted step_s 0.0125\n",
            "",
            "has predicted memory but no 'predicted step_s'",
        ),
        ("devices slow/0\n", "devices fast/1\n", "expected the memory of fast/1 once"),
        ("microbatches 6  ", "", "expected 'microbatches' of the replica"),
        ("slow/3,slow/1", '"slow/3', "expected a closing quote"),
    ],
)
def test_a_slip_is_shown_with_its_line(old: str, new: str, message: str):
    assert old in GOLDEN
    with pytest.raises(PlanError) as caught:
        parse(GOLDEN.replace(old, new, 1))
    assert message in str(caught.value)


def test_an_error_points_at_the_word():
    with pytest.raises(PlanError) as caught:
        parse("hexijax plan 1\nschedule 1f2b  # or gpipe\n", source="plan.txt")
    assert str(caught.value).splitlines() == [
        "plan.txt, line 2: expected a schedule: 1f1b, gpipe, interleaved, "
        "zero-bubble, eager-1f1b, layered, found '1f2b'. Did you mean '1f1b'?",
        "    schedule 1f2b  # or gpipe",
        "             ^^^^",
    ]


def test_files_that_are_no_text(tmp_path: Path):
    with pytest.raises(PlanError, match="Cannot read the plan .*: No such file"):
        read(tmp_path / "plan.txt")
    (tmp_path / "plan.txt").write_bytes(b"hexijax \xff")
    with pytest.raises(PlanError, match="is not UTF-8 text: byte 8 is 0xff"):
        read(tmp_path / "plan.txt")
    with pytest.raises(PlanError, match="plan is empty. A plan starts with 'hexijax"):
        parse("# nothing\n")
