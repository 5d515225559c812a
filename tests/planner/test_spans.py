"""What a search lets fit while it splits layers, beside what the plan then promises."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, Node
from hexijax.costs.activations import Waiting, handed_microbatches, live_microbatches
from hexijax.costs.compute import MeshShape
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain, Remat
from hexijax.layers.known import gpt, llama
from hexijax.plan.plan import Plan, Replica, Schedule, Stage, stage_place
from hexijax.planner.arrays import LayerArrays
from hexijax.planner.regime import FREED, LAYERED, WAITING, Regime
from hexijax.planner.segments import segments
from hexijax.planner.spans import span_tables
from hexijax.planner.terms import Asked, Held, Load
from tests.plan.examples import make_chain, make_cluster

LINK = LinkProfile(latency_s=1e-5, bytes_per_s=1e11)
CHAINS = {
    "cpu": make_chain(6, width=256, rows=256),
    "llama": llama(depth=6, width=1024, num_heads=8, length=2048, ff_width=2752),
    "gpt": gpt(depth=6, width=1024, num_heads=16, length=1024, tied=False),
}

NOT_BY_SPANS = (Schedule.INTERLEAVED, Schedule.LAYERED)
"""A stage a device holds several of; and one of which a test of its own tells."""


def cluster_of(kind: str) -> Cluster:
    if kind == "cpu":
        return make_cluster([[("fast", 4)]])
    node = Node(
        name="n0",
        devices=(DeviceGroup(kind=kind, count=4),),
        host_memory_bytes=2**38,
        host_cores=8,
    )
    return Cluster(
        name=kind, nodes=(node,), links=Links(in_node=LINK, between_nodes=LINK)
    )


CLUSTERS = {kind: cluster_of(kind) for kind in ("cpu", "h100-80g-sxm", "v100-16g-sxm")}


def pipeline(
    chain: Chain, edges: list[int], microbatches: int, size: int, dtype: str
) -> Replica:
    stages = tuple(
        Stage(devices=(f"n0/{k}",), layers=span, dtype=dtype)
        for k, span in enumerate(itertools.pairwise([0, *edges, len(chain.layers)]))
    )
    return Replica(
        stages=stages,
        microbatches=microbatches,
        microbatch_size=size,
        samples=microbatches * size,
    )


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("cpu", "cpu", "float32"),
        ("llama", "h100-80g-sxm", "bfloat16"),
        ("gpt", "h100-80g-sxm", "bfloat16"),
        ("gpt", "v100-16g-sxm", "float16"),
    ],
)
@settings(max_examples=25)
@given(data=st.data())
def test_what_the_search_lets_fit_is_promised_to_fit(
    name: str, kind: str, dtype: str, data: st.DataObject
):
    chain, cluster = CHAINS[name], CLUSTERS[kind]
    cuts = st.lists(
        st.integers(1, len(chain.layers) - 1), min_size=1, max_size=3, unique=True
    )
    replica = pipeline(
        chain,
        sorted(data.draw(cuts)),
        data.draw(st.integers(1, 8)),
        data.draw(st.integers(1, 4)),
        dtype,
    )
    schedule = data.draw(
        st.sampled_from([s for s in Schedule if s not in NOT_BY_SPANS])
    )
    live = live_microbatches(schedule, replica)
    handed = handed_microbatches(schedule, replica)
    profile = cluster.device("n0/0").profile
    mesh = MeshShape(profile=profile, dtype=dtype, usable_memory_bytes=2**40)

    def chosen(
        budget_bytes: int, remat: tuple[Remat, ...] = tuple(Remat)
    ) -> list[tuple[Remat, ...] | None]:
        """Remat of each stage where it fits."""
        arrays = LayerArrays(chain, mesh, replica.microbatch_size, remat)
        load = Load(members=1, moments=2, per_segment=None, remat=remat)
        asked = [
            Asked(
                arrays=arrays,
                state_devices=1,
                budget_bytes=budget_bytes,
                held=Held(live=live[s], handed=handed[s], waiting=Waiting.of(live, s)),
            )
            for s in range(len(live))
        ]
        return [
            table.remat(*stage.layers) if table.seconds(*stage.layers) < 1e9 else None
            for table, stage in zip(
                span_tables(load, asked), replica.stages, strict=True
            )
        ]

    def promised(policies: list[tuple[Remat, ...]]) -> dict[str, int]:
        stages = tuple(
            Stage(devices=stage.devices, layers=stage.layers, dtype=dtype, remat=policy)
            for stage, policy in zip(replica.stages, policies, strict=True)
        )
        plan = Plan(
            replicas=(
                Replica(
                    stages=stages,
                    microbatches=replica.microbatches,
                    microbatch_size=replica.microbatch_size,
                    samples=replica.samples,
                ),
            ),
            batch_size=replica.samples,
            schedule=schedule,
        )
        found = plan_memory(plan, chain, cluster)
        return {device: parts.total_bytes for device, parts in found.items()}

    plain = [(Remat.NONE,) * (s.layers[1] - s.layers[0]) for s in replica.stages]
    most = promised(plain)
    budget = int(data.draw(st.floats(0.5, 1.5)) * max(most.values()))
    fits = chosen(budget)
    found = promised([a or b for a, b in zip(fits, plain, strict=True)])
    for stage, policy in zip(replica.stages, fits, strict=True):
        if policy:
            assert found[stage.devices[0]] <= budget, (stage, policy)
    # And it refuses nothing that has a quarter to spare.
    roomy = chosen(int(1.25 * max(most.values())) + 2**26, (Remat.NONE,))
    assert roomy == plain


@pytest.mark.parametrize("kind", ["h100-80g-sxm", "v100-16g-sxm"])
@settings(max_examples=25)
@given(data=st.data())
def test_seconds_are_those_of_the_programs_and_dots_is_taken_where_it_is_quicker(
    kind: str, data: st.DataObject
):
    chain, cluster = CHAINS["gpt"], CLUSTERS[kind]
    dtype = "bfloat16" if kind.startswith("h") else "float16"
    cut, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    most = data.draw(st.sampled_from([None, 1, 2, 4]))
    replica = pipeline(chain, [cut], 8, size, dtype)
    live = live_microbatches(Schedule.ONE_F_ONE_B, replica)
    profile = cluster.device("n0/0").profile
    mesh = MeshShape(profile=profile, dtype=dtype, usable_memory_bytes=2**40)
    arrays = LayerArrays(chain, mesh, size, tuple(Remat))
    load = Load(members=2, moments=2, per_segment=most, remat=tuple(Remat))
    budget_bytes = int(data.draw(st.floats(2, 60)) * 2**30)
    asked = [
        Asked(
            arrays=arrays,
            state_devices=1,
            budget_bytes=budget_bytes,
            held=Held(live=live[s], handed=0, waiting=Waiting.of(live, s)),
        )
        for s in range(len(live))
    ]
    tables = span_tables(load, asked)

    def stage_s(s: int, policies: tuple[Remat, ...]) -> float:
        stages = list(replica.stages)
        stages[s] = dataclasses.replace(
            stages[s],
            remat=policies,
            segments=segments(stages[s].num_layers, most),
        )
        plan = Plan(
            replicas=(dataclasses.replace(replica, stages=tuple(stages)),),
            batch_size=replica.samples,
        )
        return PlanCosts(plan, chain, cluster, 2).stage_s(stage_place(0, s))

    for s, (table, stage) in enumerate(zip(tables, replica.stages, strict=True)):
        seconds = table.seconds(*stage.layers)
        if seconds < 1e9:
            policies = table.remat(*stage.layers)
            assert seconds == pytest.approx(stage_s(s, policies))
            if Remat.FULL not in policies:
                dots = (Remat.DOTS,) * stage.num_layers
                assert seconds <= stage_s(s, dots) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("regime", [LAYERED, FREED, WAITING])
@settings(max_examples=12)
@given(data=st.data())
def test_what_a_regime_lets_fit_is_promised_to_fit(
    name: str, regime: Regime, data: st.DataObject
):
    chain, kind, dtype = CHAINS[name], "h100-80g-sxm", "bfloat16"
    cluster = CLUSTERS[kind]
    members, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    size = data.draw(st.integers(1, 3))
    num_layers = len(chain.layers)
    mesh = MeshShape(
        profile=cluster.device("n0/0").profile, dtype=dtype, usable_memory_bytes=2**40
    )
    replica = pipeline(chain, [], count, size, dtype)
    live = live_microbatches(Schedule.LAYERED, replica)

    def chosen(budget_bytes: int, remat: tuple[Remat, ...]) -> tuple[Remat, ...] | None:
        load = Load(
            members=members, moments=2, per_segment=1, remat=remat, regime=regime
        )
        asked = Asked(
            arrays=LayerArrays(chain, mesh, size, remat),
            state_devices=members,
            budget_bytes=budget_bytes,
            held=Held(live=count, waiting=Waiting.of(live, 0)),
        )
        (table,) = span_tables(load, [asked])
        fits = table.seconds(0, num_layers) < 1e9
        return table.remat(0, num_layers) if fits else None

    def promised(policies: tuple[Remat, ...]) -> int:
        stage = dataclasses.replace(
            replica.stages[0],
            segments=(1,) * num_layers,
            remat=policies,
            params=regime.params(num_layers),
            waits=regime.memory(num_layers),
        )
        replicas = tuple(
            dataclasses.replace(
                replica, stages=(dataclasses.replace(stage, devices=(f"n0/{r}",)),)
            )
            for r in range(members)
        )
        plan = Plan(
            replicas=replicas,
            batch_size=members * replica.samples,
            schedule=Schedule.LAYERED,
        )
        found = plan_memory(plan, chain, cluster)
        return max(parts.total_bytes for parts in found.values())

    plain = (Remat.NONE,) * num_layers
    most = promised(plain)
    budget = int(data.draw(st.floats(0.5, 1.5)) * most)
    fits = chosen(budget, tuple(Remat))
    if fits:
        assert promised(fits) <= budget
    # And it refuses nothing that has a quarter to spare.
    assert chosen(int(1.25 * most) + 2**26, (Remat.NONE,)) == plain
