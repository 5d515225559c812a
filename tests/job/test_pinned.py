"""Host memory that a plan has not got is told before anything is allocated."""

import pytest

from hexijax.costs.hosts import LIMIT_BYTES, LIMIT_VARIABLE
from hexijax.costs.memory import plan_memory
from hexijax.errors import UserError
from hexijax.job.pinned import check_host
from hexijax.layers.known import gpt
from hexijax.plan.plan import Memory, Plan, PlanError, Replica, Stage, StateShare
from hexijax.plan.training import Training
from tests.planner.offload_boxes import machine

CHAIN = gpt(depth=30, width=4096, num_heads=32, length=1024)
PLAN = Plan(
    replicas=(
        Replica(
            stages=(Stage(devices=("box/0",), layers=(0, 32), segments=(1,) * 32),),
            microbatches=1,
            microbatch_size=1,
            samples=1,
        ),
    ),
    batch_size=1,
    state=(StateShare(groups=("*",), shares={}, memory=Memory.HOST),),
)
HOST_BYTES = plan_memory(PLAN, CHAIN, machine(80_000))["box/0"].host_bytes


def test_the_plan_rests_its_state():
    state_bytes = 12 * CHAIN.num_trained
    assert state_bytes <= HOST_BYTES < 1.001 * state_bytes


def test_what_xla_does_not_pin_is_said_with_the_variable_and_a_size_that_does():
    with pytest.raises(UserError) as caught:
        check_host(PLAN, CHAIN, machine(80_000, host_gib=200), Training(), environ={})
    text = str(caught.value)
    assert f"The plan rests {HOST_BYTES:,} bytes in pinned host memory on box" in text
    assert f"XLA pins at most {LIMIT_BYTES:,} there" in text
    asked = text.split(f"Set {LIMIT_VARIABLE}=")[1].split()[0]
    assert HOST_BYTES < int(asked) * 2**30 < 1.2 * HOST_BYTES
    check_host(
        PLAN,
        CHAIN,
        machine(80_000, host_gib=200),
        Training(),
        environ={LIMIT_VARIABLE: asked},
    )


def test_a_host_that_is_too_small_is_said_with_both_numbers():
    cluster = machine(80_000, host_gib=32)
    for emulate in (False, True):
        with pytest.raises(PlanError) as caught:
            check_host(PLAN, CHAIN, cluster, Training(), emulate=emulate, environ={})
        assert str(caught.value).startswith(
            f"The plan has {HOST_BYTES:,} bytes wait or rest in host memory on box, "
            "which has 24,403,223,272 beside its process and XLA's pool, of "
            "34,359,738,368."
        )


def test_cpu_devices_that_stand_for_cards_pin_what_they_like():
    cluster = machine(80_000, host_gib=200)
    check_host(PLAN, CHAIN, cluster, Training(), emulate=True, environ={})
