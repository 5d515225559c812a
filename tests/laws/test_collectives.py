"""Uneven slices by one collective: the same parameters as by pieces, and the same sums.

Any shapes, shares and paths: nothing, a part and all of what each home holds.
"""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hexijax.costs import PlanCosts
from hexijax.errors import UserError
from hexijax.layers.chain import Chain, Group, Leaf
from hexijax.plan.plan import Place, Plan, Reductions, Replica, Stage, StateShare
from hexijax.program.boxes import users
from hexijax.program.program import Gather, Instruction, Reduce
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.layout import Layout, box_shape
from hexijax.runtime.optimizer import GroupUpdate
from hexijax.runtime.programs import Programs
from tests.laws.cases import Case, Outcome, chain, check, run
from tests.laws.law_models import Shape
from tests.laws.test_exactness import by_hand
from tests.laws.test_travel import DEVICES
from tests.program.examples import make_chain, make_plan, make_stages

NODE = [name for name in DEVICES if name.startswith("fast")]
STORE = "slow/0"
FEW, MANY = range(4), range(4, 60)


def make_runtime(seed: int, dtypes: tuple[str, ...] = ("float32",)) -> GroupRuntime:
    """Users of one device each, with uneven parts, none, or a store beside them."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 4])
    plan, chain = _case(rng, count)
    (group,) = chain.groups
    tree = {x.name: jax.ShapeDtypeStruct(x.shape, "float32") for x in group.leaves}
    chosen = [rng.choice(dtypes) for _ in group.leaves]
    members = users(plan, group)
    return GroupRuntime(
        layout=Layout(plan, chain, DEVICES),
        programs=Programs(),
        update=GroupUpdate.of(optax.sgd(0.1), tree),
        group=group,
        members=members,
        param_dtypes=dict.fromkeys(members, chosen),
        unscale=1.0,
        guarded=False,
    )


def _case(rng: random.Random, count: int) -> tuple[Plan, Chain]:
    shapes = [(), (7,), (rng.randint(1, 900), 33), (3, 5, 7), (257, 129)]
    shapes += [(rng.choice([4, 1023, 1024]), 1024)] * (rng.random() < 0.5)
    rng.shuffle(shapes)
    leaves = tuple(Leaf(name=f"l0/{i}", shape=x) for i, x in enumerate(shapes))
    group = Group(name="l0", leaves=leaves, layers=(0,))
    layers = dataclasses.replace(make_chain(1), groups=(group,))
    (stage,) = make_stages([1])
    stages = [dataclasses.replace(stage, devices=(name,)) for name in NODE[:count]]
    shares = {Place(f"r{i}.s0"): rng.choice([0.0, 1.0, 1.0, 3.0]) for i in range(count)}
    if rng.random() < 0.5 or not any(shares.values()):
        shares[Place(STORE)] = rng.choice([1.0, 2.0])
    state = (StateShare(groups=("*",), shares=shares),)
    return make_plan(*(((one,), 1) for one in stages), state=state), layers


def paths(runtime: GroupRuntime, rng: random.Random) -> list[int]:
    """All that homes hold, the least that one does, and something between."""
    held = {
        sum(int(np.prod(box_shape(box))) for _, box in runtime.held[home])
        for home in runtime.homes
        if home in runtime.members
    }
    return sorted({*held, rng.randint(1, max(held))}) if held else []


def put(value: np.ndarray, struct: Any) -> jax.Array:
    """On its devices."""
    return jax.device_put(jnp.asarray(value, struct.dtype), struct.sharding)


def gather(runtime: GroupRuntime, seed: int) -> None:
    """By each path what pieces give, bit by bit."""
    rng = np.random.default_rng(seed)
    whole = {x.id: rng.standard_normal(x.shape) for x in runtime.group.leaves}
    masters = {
        home: tuple(
            put(whole[leaf.id][tuple(slice(*rows) for rows in box)], struct)
            for (leaf, box), struct in zip(
                runtime.held[home], runtime._masters(home), strict=True
            )
        )
        for home in runtime.homes
    }
    slices = {h: runtime.slices(h, {"master": x}) for h, x in masters.items()}
    by_pieces = {
        m: runtime.join(m, runtime.send_params([m], slices)[0]) for m in runtime.members
    }
    for path in paths(runtime, random.Random(seed)):
        sent = runtime.gather(slices, path)
        for member in runtime.members:
            for leaf, got, want in zip(
                runtime.group.leaves,
                runtime.join(member, sent[member]),
                by_pieces[member],
                strict=True,
            ):
                assert got.sharding == runtime.layout.param(member, leaf)
                assert got.dtype == want.dtype
                np.testing.assert_array_equal(got, want)
                cast = whole[leaf.id].astype("float32").astype(want.dtype)
                np.testing.assert_array_equal(want, cast)


def reduce(runtime: GroupRuntime, seed: int) -> None:
    """By each path the sum, twice the same bits."""
    rng = np.random.default_rng(seed)
    grads = {
        member: tuple(
            put(rng.standard_normal(struct.shape), struct)
            for struct in runtime._grads(member)
        )
        for member in runtime.members
    }
    for path in paths(runtime, random.Random(seed)):
        first, second = (
            {home: runtime.sum(home, pieces) for home, pieces in sent.items()}
            for sent in (runtime.reduce(grads, path), runtime.reduce(grads, path))
        )
        for home in runtime.homes:
            boxes, norm = first[home]
            squares = 0.0
            for (leaf, box), got, again, sharding in zip(
                runtime.held[home],
                boxes,
                second[home][0],
                runtime._slices(home),
                strict=True,
            ):
                i = runtime.group.leaves.index(leaf)
                every = [np.asarray(grads[m][i], np.float64) for m in runtime.members]
                want = sum(every)[tuple(slice(*rows) for rows in box)]
                assert got.sharding.is_equivalent_to(sharding, got.ndim)
                np.testing.assert_array_equal(got, again)
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
                squares += float(np.square(want).sum())
            assert float(norm) == pytest.approx(squares, rel=1e-4)


@pytest.mark.parametrize("seed", FEW)
def test_a_collective_gathers_what_pieces_do(seed: int):
    gather(make_runtime(seed, ("float32", "bfloat16")), seed)


@pytest.mark.parametrize("seed", FEW)
def test_a_collective_sums_what_pieces_do(seed: int):
    reduce(make_runtime(seed), seed)


@pytest.mark.laws
@pytest.mark.parametrize("seed", MANY)
def test_any_slices_travel_by_any_path(seed: int):
    for dtypes in (("float32",), ("bfloat16",), ("float32", "bfloat16", "float16")):
        gather(make_runtime(seed, dtypes), seed)
    reduce(make_runtime(seed), seed)


@pytest.mark.laws
def test_the_many_have_homes_without_users_and_users_that_store_nothing():
    made = [make_runtime(seed) for seed in MANY]
    assert sum(STORE in r.homes for r in made) >= 10
    assert sum(any(m not in r.homes for m in r.members) for r in made) >= 10


def test_unlike_devices_never_share_a_mesh():
    runtime = make_runtime(FEW[0])

    class Unlike:
        platform, process_index = "cpu", 0

        def __init__(self, name: str) -> None:
            self.device_kind = f"card {name}"

    unlike = {name: Unlike(name) for name in DEVICES}
    object.__setattr__(runtime.layout, "devices", unlike)
    said = r"unlike: fast/0 is cpu card fast/0, process 0; fast/1 is cpu card fast/1"
    with pytest.raises(UserError, match=said):
        runtime._equals()


def three_cards(reductions: Reductions) -> Case:
    """Of one kind, with a replica and a batch each; the last stores nothing."""
    stop = len(chain(Shape()).layers)
    each = [
        Replica(
            stages=(Stage(devices=(name,), layers=(0, stop)),),
            microbatches=2,
            microbatch_size=size,
            samples=2 * size,
        )
        for name, size in zip(NODE, (3, 2, 1), strict=False)
    ]
    shares = {Place("r0.s0"): 3.0, Place("r1.s0"): 1.0, Place(STORE): 1.0}
    state = (StateShare(groups=("*",), shares=shares),)
    return by_hand(Shape(), *each, reductions=reductions, state=state)


def forced(monkeypatch: Any) -> None:
    """A collective of all that the largest home holds, whatever it costs."""

    def path(costs: PlanCosts, group: str, **_: Any) -> int:
        exchange = costs.exchange(group)
        return max(exchange.held.get(member, 0) for member in exchange.members)

    monkeypatch.setattr(PlanCosts, "gather_path", path)
    monkeypatch.setattr(PlanCosts, "reduce_path", path)


def together(outcome: Outcome, kind: type[Instruction]) -> int:
    """Instructions of a body that go by a collective."""
    body = outcome.engine.program.body
    return sum(getattr(i, "path", 0) > 0 for i in body if isinstance(i, kind))


@pytest.mark.laws
def test_fast_sums_give_the_plain_program_s_numbers(monkeypatch: Any):
    forced(monkeypatch)
    case = three_cards(Reductions.FAST)
    outcome = run(case, monkeypatch)
    assert together(outcome, Reduce)
    assert together(outcome, Gather)
    check(case, outcome)


@pytest.mark.laws
@pytest.mark.parametrize("reductions", list(Reductions))
def test_two_runs_give_the_same_bits(reductions: Reductions, monkeypatch: Any):
    forced(monkeypatch)
    case = three_cards(reductions)
    first, second = run(case, monkeypatch), run(case, monkeypatch)
    for name, value in first.params.items():
        np.testing.assert_array_equal(value, second.params[name])


@pytest.mark.laws
def test_exact_parameters_are_the_same_by_pieces_and_by_collectives(monkeypatch: Any):
    by_pieces = run(three_cards(Reductions.EXACT), monkeypatch)
    forced(monkeypatch)
    case = three_cards(Reductions.EXACT)
    by_collective = run(case, monkeypatch)
    assert together(by_collective, Gather)
    assert not together(by_collective, Reduce)
    assert not together(by_pieces, Gather)
    for name, value in by_pieces.params.items():
        np.testing.assert_array_equal(value, by_collective.params[name])
