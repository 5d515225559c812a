"""What a profile lacks is refused by name, or filled in and said: never free."""

import dataclasses
from collections.abc import Sequence

import pytest

from hexijax.cluster import Cluster, LinkProfile, Links
from hexijax.costs.measured import NotMeasuredError
from hexijax.plan import Plan, PlanError
from hexijax.plan.plan import Replica, Stage
from hexijax.planner import make_plan
from hexijax.report.grounds import grounds
from hexijax.report.judged import judge
from hexijax.report.problem import Problem
from hexijax.simulator import predict
from tests.trials.cases import chain_of, kind, machines

CHAIN = chain_of([1] * 6)


def measured(
    sizes: Sequence[int] = (2, 8), tensor: int = 1, signature: str = "weight 1"
) -> Cluster:
    """Two cards whose layers were measured: 3 ms and 1 ms a sample."""
    rows = tuple(
        {
            "signature": signature,
            "dtype": "float32",
            "tensor": tensor,
            "samples": samples,
            "forward_s": 1e-3 + samples * 1e-3 / 3,
            "backward_s": 2e-3 + samples * 2e-3 / 3,
        }
        for samples in sizes
    )
    return machines([(dataclasses.replace(kind("card"), layer_times=rows), 2)])


def whole(size: int, *, tensor: int = 1, dtype: str = "float32") -> Plan:
    """All layers on both cards."""
    stage = Stage(
        devices=("n0/0", "n0/1"),
        layers=(0, 6),
        lanes=2 // tensor,
        tensor=tensor,
        dtype=dtype,
    )
    lanes = 2 // tensor
    replica = Replica(
        stages=(stage,),
        microbatches=4,
        microbatch_size=size * lanes,
        samples=4 * size * lanes,
    )
    return Plan(replicas=(replica,), batch_size=replica.samples)


def said(plan: Plan, cluster: Cluster) -> list[str]:
    problem = Problem(
        name="trial", chain=CHAIN, cluster=cluster, batch_size=plan.batch_size
    )
    return [*grounds(judge("given", plan, problem))]


def test_a_tensor_degree_that_was_not_measured_is_refused_by_name():
    with pytest.raises(NotMeasuredError) as caught:
        predict(whole(2, tensor=2), CHAIN, measured())
    assert str(caught.value) == (
        "Layer weight 1 in float32 at tensor degree 2 was asked of a card, which has "
        "measured times of it at tensor degree 1 only. A time is never guessed from "
        "another degree: let the same `hexijax profile` go on until "
        "it has degree 2, or use a plan of degree 1."
    )


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (2, []),
        (
            4,
            ["times of card: layers 6 by a line between measured microbatches (of 4)"],
        ),
        (
            16,
            ["times of card: layers 6 by a line beyond measured microbatches (of 16)"],
        ),
    ],
)
def test_a_batch_size_between_or_beyond_is_filled_in_and_said(size, says):
    plan = whole(size)
    assert said(plan, measured()) == says
    step_s = predict(plan, CHAIN, measured()).step_s
    assert step_s >= 4 * 6 * (3e-3 + size * 1e-3)  # the measured line, not less


def test_a_layer_that_was_not_measured_goes_by_the_data_sheet_and_is_said():
    cluster = measured(signature="another layer")
    assert said(whole(2), cluster) == ["times of card: layers 6 by the data sheet"]
    assert predict(whole(2), CHAIN, cluster).step_s > 0.1
    assert said(whole(2), machines([(kind("card"), 2)])) == []


def test_one_measured_size_is_stretched_by_its_time_a_sample():
    plan = whole(8)
    one = measured(sizes=(2,))
    assert said(plan, one) != []
    assert predict(plan, CHAIN, one).step_s >= 4 * 6 * 4 * 5e-3


def test_a_dtype_that_the_kind_lacks_is_refused_by_name():
    with pytest.raises(PlanError, match="The compute dtype 'float8' was asked for"):
        make_plan(CHAIN, measured(), batch_size=8, dtype="float8")


def test_a_missing_link_is_refused_by_name():
    between = LinkProfile(latency_s=1e-5, bytes_per_s=1e9)
    apart = machines([(kind("card"), 1)], [(kind("card"), 1)])
    with pytest.raises(ValueError, match="nothing joins nodes 'n0' and 'n1'"):
        dataclasses.replace(apart, links=Links(in_node=between))
    beside = machines([(kind("card"), 2)])
    with pytest.raises(ValueError, match="nothing joins devices n0/0 and n0/1"):
        dataclasses.replace(beside, links=Links(between_nodes=between))


@pytest.mark.parametrize("num_bytes", [10, 1000, 3000, 10**6])
def test_a_message_between_or_past_the_measured_sizes_is_never_free(num_bytes: int):
    """Straight lines between measured sizes, the last line's slope beyond them."""
    link = LinkProfile(
        latency_s=1e-5,
        bytes_per_s=1e9,
        measured=((1000, 20e-6), (2000, 30e-6), (4000, 40e-6)),
    )
    sizes = (0, num_bytes, 2 * num_bytes)
    times = [link.transfer_s(size) for size in sizes]
    assert 0 < times[0] <= times[1] < times[2]
