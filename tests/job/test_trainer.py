"""The Trainer: a person's own loop gets one device's numbers, and keeps its place."""

import functools
import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hexijax
from hexijax import Trainer
from hexijax.data import RandomTokens
from hexijax.errors import UserError
from hexijax.job.loop import Diverged
from hexijax.plan import PlanError
from hexijax.runtime.batches import sample_keys
from tests.cli import tiny

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "experiments/clusters/quickstart.toml"
PLAN = ROOT / "tests/cli/tiny_plan.txt"
SIZE = 8
LOSS = tiny.experiment().loss
OPTIMIZER = optax.sgd(0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("backend")


def batches(count: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
    yield from itertools.islice(RandomTokens(16, 4).batches(SIZE), start, start + count)


@pytest.fixture(scope="module")
def params() -> Any:
    return jax.tree.map(np.asarray, LOSS.init(jax.random.key(5)))


def trainer(**fields: Any) -> Trainer:
    fields = {"cluster": CLUSTER, "plan": PLAN, **fields}
    return Trainer(fields.pop("loss", LOSS), fields.pop("params", None), **fields)


def make_any(**fields: Any) -> Trainer:
    return trainer(optimizer=OPTIMIZER, **fields)


make = make_any


def plain_losses(params: Any, batches: Any) -> list[float]:
    """A plain loop in optax: what the Trainer must give."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any, keys: Any) -> Any:
        def mean(params: Any) -> Any:
            total, weight = LOSS(params, batch, jax.random.wrap_key_data(keys))
            return jnp.sum(total) / jnp.sum(weight)

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = OPTIMIZER.init(params), []
    for number, batch in enumerate(batches):
        keys = sample_keys(0, number, SIZE)
        params, state, loss = step(params, state, batch, keys)
        losses.append(float(loss))
    return losses


def test_an_own_loop_has_the_plain_loops_losses(params: Any):
    own = make(params=params)
    with pytest.raises(UserError, match=r"a plan once it knows what a batch looks lik"):
        own.plan  # noqa: B018
    losses = [own.step(batch)["loss"] for batch in batches(4)]
    assert losses == pytest.approx(plain_losses(params, batches(4)), rel=1e-5)
    assert own.steps_done == 4
    assert own.plan is not None
    assert [len(replica.stages) for replica in own.plan.replicas] == [2, 1]
    assert own.plan.batch_size == SIZE
    explained = own.explain()
    assert "replica 1" in explained
    assert "fast/0-1 cpu-fast tensor 2" in explained
    # The tree that went in is as it was; the tree that comes out is like it, trained.
    trained = own.params()
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(trained))
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), trained, params)
    assert all(jax.tree.leaves(moved))


def test_numbers_are_waited_for_when_they_are_read(params: Any):
    own = make(params=params, plan="single")
    first = own.step(next(batches(1)))
    assert first._fetch is not None
    assert {"loss", "weight", "grad_norm"} <= set(first)
    assert first._fetch is None
    assert first["weight"] == SIZE * 4
    waiting = [own.step(batch) for batch in batches(3)]
    assert [numbers._fetch is None for numbers in waiting] == [True, True, False]


def test_a_saved_trainer_goes_on_bit_by_bit(params: Any, tmp_path: Path):
    unbroken = make(params=params)
    losses = [unbroken.step(batch)["loss"] for batch in batches(5)]
    first = make(params=params)
    for batch in batches(3):
        first.step(batch)
    assert first.save(tmp_path / "run", {"at": 3}) == tmp_path / "run"
    # Whatever parameters it has, and without a word of its plan and its batches.
    again = make(params=jax.tree.map(np.zeros_like, params), plan=None)
    assert again.resume(tmp_path / "run") == {"at": 3}
    assert again.steps_done == 3
    assert again.plan == first.plan
    assert [again.step(b)["loss"] for b in batches(2, start=3)] == losses[3:]
    for a, b in zip(
        jax.tree.leaves(again.params()),
        jax.tree.leaves(unbroken.params()),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    # The folder is a run's.
    first.save(tmp_path / "run")
    loaded = hexijax.load(tmp_path / "run")
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, first.params()))
    begun = make(params=str(tmp_path / "run"), plan="single")
    begun.prepare(next(batches(1)))
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, begun.params()))
    with pytest.raises(UserError, match="holds step 3 of a run already, and this one"):
        begun.save(tmp_path / "run")
    for fields, says in [
        ({"seed": 1}, "its seed is 0, this run's is 1"),
        ({"batch_size": 16}, "its batch size is 8, this run's is 16"),
    ]:
        with pytest.raises(UserError, match=says):
            make(**{"plan": None, **fields}).resume(tmp_path / "run")
    with pytest.raises(UserError, match="There is no checkpoint in"):
        make().resume(tmp_path)
    plain = make(plan="single")  # any plan goes on from any other's
    plain.resume(tmp_path / "run")
    assert plain.step(next(batches(1, start=3)))["loss"] == pytest.approx(losses[3])


def test_fit_goes_on_where_the_data_stood(params: Any, tmp_path: Path):
    data = RandomTokens(16, 4)
    lines: list[Any] = []
    make = functools.partial(make_any, plan="single", batch_size=SIZE)
    unbroken = make(params=params)
    evaluated = {"eval_data": list(batches(2, start=40)), "eval_every": 2}
    assert unbroken.fit(data, 5, callbacks=[lines.append], **evaluated)
    assert [line["step"] for line in lines] == list(range(5))
    assert ["eval_loss" in line for line in lines] == [False, True, False, True, False]
    first = make(params=params)
    assert first.fit(data, 3, save=tmp_path)
    again = make(plan=None)
    again.resume(tmp_path)
    told: list[Any] = []
    assert again.fit(data, 2, callbacks=[told.append])
    assert [(x["step"], x["loss"]) for x in told] == [
        (line["step"], line["loss"]) for line in lines[3:]
    ]
    assert again.steps_done == 5
    other = make()
    other.resume(tmp_path)
    with pytest.raises(UserError, match=r"trained on data random-16-4-0, and fit"):
        other.fit(RandomTokens(16, 4, seed=1), 2)


def test_a_callback_may_end_it_and_data_may_end_early(params: Any, tmp_path: Path):
    own = make(params=params, plan="single")

    def enough(line: Any) -> None:
        if line["step"] == 2:
            own.stop()

    assert not own.fit(batches(99), 50, callbacks=[enough])
    assert own.steps_done == 4  # step 3 was computing
    with pytest.raises(
        UserError,
        match=r"The data ended after 2 batches, and 9 steps were asked for\. The first "
        r"6 steps of the run are done and stand",
    ):
        own.fit(batches(2), 9, save=tmp_path)
    assert own.steps_done == 6
    again = make(plan="single")
    again.resume(tmp_path)
    assert again.steps_done == 6
    with pytest.raises(UserError, match=r"ended after 0 batches, and 3 steps were"):
        make().fit(iter(()), 3)


def test_an_evaluation_takes_any_batches(params: Any):
    own = make(params=params, batch_size=SIZE, plan="single")
    found = own.evaluate(list(batches(3)))
    assert found == own.evaluate(RandomTokens(16, 4), 3)
    assert found["loss"] == pytest.approx(
        np.mean([own.evaluate([batch])["loss"] for batch in batches(3)])
    )
    with pytest.raises(UserError, match="data ended before its first"):
        make(batch_size=SIZE).evaluate([])
    with pytest.raises(UserError, match=r"does not know the batch size\. Give it"):
        make().evaluate(list(batches(1)))
    with pytest.raises(UserError, match=r"eval_data is a generator, which can be"):
        own.fit(batches(2), 2, eval_data=batches(2), eval_every=1)


def test_a_plain_function_without_keys_is_a_loss(params: Any):
    def loss(params: Any, batch: Any) -> Any:
        return LOSS(params, batch, jnp.zeros(len(batch["inputs"])))

    own = make(loss=loss, params=params, plan="single")
    assert own.step(next(batches(1)))["loss"] == pytest.approx(
        plain_losses(params, batches(1))[0]
    )


def test_the_tree_that_went_in_is_let_go():
    tree = jax.tree.map(np.asarray, LOSS.init(jax.random.key(1)))
    held = [weakref.ref(leaf) for leaf in jax.tree.leaves(tree)]
    own = make(params=tree, plan="single")
    del tree
    assert all(leaf() is not None for leaf in held)
    own.step(BATCH).wait()  # a CPU's arrays may share the memory until then
    gc.collect()
    assert not [leaf for leaf in held if leaf() is not None]


def test_a_fit_that_diverges_says_what_to_give_a_trainer():
    loss = tiny.experiment(broken=True).loss
    own = make(loss=loss, plan="single")
    with pytest.raises(
        Diverged,
        match=r"The loss of step 0 is nan\. Try clip_norm=1, a smaller .* "
        r"skip_nonfinite=True to .* With save_every=N a run can go on",
    ):
        own.fit(batches(2), 2)


def test_rules_are_the_experiments(params: Any):
    """Frozen parameters stay, and a dynamic scale is saved with the rest."""
    own = make(
        params=params,
        clip_norm=0.01,
        loss_scale="dynamic",
        trainable=lambda path: not path.startswith("embed"),
    )
    assert own.step(BATCH)["grad_norm"] > 0.01
    trained = own.params()
    same = jax.tree.map(np.array_equal, trained, params)
    assert {k: jax.tree.all(v) for k, v in same.items()} == {
        "blocks": False,
        "embed": True,
        "head": False,
    }


def test_int64_and_lists_are_what_jax_makes_of_them(params: Any):
    own = make(params=params, plan="single")
    batch = next(batches(1))
    wide = {"inputs": batch["inputs"].astype(np.int64), "targets": batch["targets"]}
    first = own.evaluate([wide]) if own.prepare(wide) is None else {}
    listed = {name: x.tolist() for name, x in batch.items()}
    assert own.evaluate([listed]) == own.evaluate([batch]) == first
    assert own.evaluate([{k: jnp.asarray(x) for k, x in batch.items()}]) == first


BATCH = next(batches(1))


@pytest.mark.parametrize("plan", [PLAN, "single"])
@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            {k: x[:7] for k, x in BATCH.items()},
            r"The batch of step 1: '\w+' has 7 samples, and the batch size is 8: a step"
            " takes exactly that many under every plan. Leave a short last batch out",
        ),
        (
            {k: np.repeat(x, 2, 0) for k, x in BATCH.items()},
            "has 16 samples, and the batch size is 8",
        ),
        (
            {**BATCH, "inputs": BATCH["inputs"].astype(np.float32)},
            r"a sample of 'inputs' is float32\[4\], and the first batch's was int32\[4",
        ),
        ({**BATCH, "targets": BATCH["targets"][:, :3]}, r"int32\[3\], and the first"),
        (
            {"inputs": BATCH["inputs"], "target": BATCH["targets"]},
            "has the arrays inputs, target, and the first batch had inputs, targets: "
            "targets missing; target not known. Did you mean 'targets'?",
        ),
        (
            {"inputs": BATCH["inputs"], "targets": BATCH["targets"][:7]},
            "'targets' has 7 samples, and the batch size is 8",
        ),
        ({**BATCH, "names": ["x"] * 8}, "names not known"),
        (list(BATCH.values()), "A batch is a dict of arrays by name; a list was given"),
    ],
)
def test_a_batch_unlike_the_first_is_refused_and_not_trained_on(
    plan: Any, batch: Any, says: str, trained: dict[str, Trainer], params: Any
):
    own = trained.setdefault(str(plan), make(params=params, plan=plan))
    if own.steps_done == 0:
        own.step(BATCH)
    before = own.params()
    with pytest.raises(UserError, match=says):
        own.step(batch)
    assert own.steps_done == 1
    assert jax.tree.all(jax.tree.map(np.array_equal, before, own.params()))


@pytest.fixture(scope="module")
def trained() -> dict[str, Trainer]:
    return {}


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": np.ones(3), "y": np.ones(2)}, "numbers of samples: x 3, y 2. Dim 0 of"),
        ({"x": np.ones((0, 3))}, "samples: x 0"),
        ({}, "samples: none"),
        ({"x": ["a", "b"]}, r"'x' is str32\[2\]; every array holds numbers"),
        ({"x": np.float32(1)}, r"'x' is float32\[\]; every array"),
        ({"x": [[1], [1, 2]]}, "'x' is no array"),
    ],
)
def test_a_first_batch_is_looked_at(batch: Any, says: str):
    with pytest.raises(UserError, match=says):
        make().step(batch)


def test_a_batch_without_weight_is_refused(params: Any):
    def loss(params: Any, batch: Any) -> Any:
        total, weight = LOSS(params, batch, jnp.zeros(len(batch["w"])))
        return total * batch["w"], weight * batch["w"]

    own = make(loss=loss, params=params)
    zero = {**BATCH, "w": np.zeros(SIZE, np.float32)}
    with pytest.raises(UserError, match="The batch of step 0 has weight 0"):
        own.step(zero)
    single = make(loss=loss, params=params, plan="single")
    with pytest.raises(Diverged, match="The batch of step 0 has weight 0"):
        single.fit([zero], 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"optimizer": None}, "The Trainer has no optimizer"),
        ({"loss": 3, "optimizer": OPTIMIZER}, "loss is a int; it must be a function"),
        (
            {"loss": lambda p, b: 0, "optimizer": OPTIMIZER},
            "'trainer' has no parameters: its loss is a plain function",
        ),
        (
            {"optimizer": OPTIMIZER, "clip_nrom": 1.0},
            "no argument 'clip_nrom'. Did you mean 'clip_norm'?",
        ),
        ({"optimizer": OPTIMIZER, "steps": 3}, "'steps'. It is for fit to know"),
        ({"optimizer": OPTIMIZER, "clip_norm": -1.0}, "clip_norm is -1.0; it must be"),
        ({"optimizer": OPTIMIZER, "cluster": "none.toml"}, "no cluster file none.toml"),
        (
            {"optimizer": OPTIMIZER, "params": {"head": np.ones(3)}},
            "of another shape|missing|does not|differs|lacks",
        ),
    ],
)
def test_what_does_not_fit_is_told_at_once(fields: dict[str, Any], says: str):
    with pytest.raises(UserError, match=says):
        trainer(**fields)


def test_a_plan_for_another_model_or_batch_is_refused(params: Any):
    with pytest.raises(PlanError, match="is for batches of 8 samples, and trainer ask"):
        make(batch_size=4).prepare({k: x[:4] for k, x in BATCH.items()})


def test_emulation_stands_before_jax_starts_and_is_refused_after(tmp_path: Path):
    """In a process of its own, whose JAX was told of no devices."""
    program = """if True:
        import sys
        import jax, numpy as np, optax
        import hexijax
        if "late" in sys.argv:
            jax.devices()
        def loss(params, batch):
            y = (batch["x"] @ params["w"]).sum(1)
            return y**2, jax.numpy.ones(len(y))
        hexijax.emulate(sys.argv[1])
        own = hexijax.Trainer(
            loss, {"w": np.ones((4, 4), np.float32)}, optax.sgd(0.1),
            cluster=sys.argv[1], emulate=True, plan="single",
        )
        print(len(jax.devices()), own.step({"x": np.ones((2, 4))})["loss"])
    """
    cluster = str(ROOT / "experiments/clusters/hexiscale.toml")
    done = [
        subprocess.run(
            [sys.executable, "-c", program, cluster, *late],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "", "XDG_CACHE_HOME": str(tmp_path)},
        )
        for late in ([], ["late"])
    ]
    assert done[0].stdout == "8 256.0\n", done[0].stderr
    assert (
        "needs 8 forced CPU devices, and JAX has started with 1: their number is fixed "
        f"when it first computes. Call hexijax.emulate({cluster!r}) before that, at "
        "the top of the program, or set in the environment JAX_PLATFORMS=cpu "
        'XLA_FLAGS="--xla_force_host_platform_device_count=8"'
    ) in done[1].stderr
