"""Engines without programs: the state of a plan, where the plan wants it.

Whatever an engine says and takes of its state is the engine's own code; nothing is
compiled, so that hundreds of plans can be saved and restored.
"""

import types
import zlib
from typing import Any

import jax
import numpy as np

from hexijax.checkpoint.slices import Key
from hexijax.plan.plan import Plan
from hexijax.runtime import engine as engine_module
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from hexijax.runtime.reach import Reach
from hexijax.weights.source import Tensor, index
from tests.laws import cases


class Shelf:
    """An executor, as far as state goes."""

    def __init__(self) -> None:
        self.held: dict[Any, Any] = {}

    def put(self, buffer: Any, value: Any) -> None:
        self.held[buffer] = value

    def get(self, buffer: Any) -> Any:
        return self.held[buffer]

    def run_prologue(self) -> None:
        pass


def bare(case: cases.Case, monkeypatch: Any) -> Engine:
    """The engine of a case without its programs or values."""
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    monkeypatch.setattr(engine_module, "trace_model", cases._shared_trace)
    monkeypatch.setattr(engine_module, "Executor", lambda program, parts: Shelf())
    # What the optimizer is and what it trains is the same for every plan of a model.
    frozen = cases.chain(case.shape).frozen
    monkeypatch.setattr(engine_module, "frozen_names", lambda *args: frozen)
    monkeypatch.setattr(
        engine_module, "classify", lambda *args, **fields: Reach.ELEMENTWISE
    )
    monkeypatch.setattr(Engine, "_add", lambda *args, **fields: None)
    nothing = types.SimpleNamespace(segments={})
    monkeypatch.setattr(Engine, "_parts", lambda *args: nothing)
    job = cases.experiment(case.shape, case.clipped)
    plan: Plan = case.plan
    return Engine(
        job, plan, cases.chain(case.shape), cases.cluster(), assign(cases.cluster())
    )


def numbers(key: Key, tensor: Tensor) -> np.ndarray:
    """All of an array: the same for all plans, another for each key."""
    rng = np.random.default_rng(zlib.crc32(str(key).encode()))
    if tensor.dtype.kind == "f":
        return rng.standard_normal(tensor.shape).astype(tensor.dtype)
    return rng.integers(0, 99, tensor.shape).astype(tensor.dtype)


def fill(engine: Any) -> None:
    """Gives an engine the numbers of its state."""
    whole = {key: numbers(key, tensor) for key, tensor in engine.tensors().items()}
    engine.load(
        {
            each: [
                jax.device_put(whole[each.key][index(each.box)], like.sharding)
                for like in copies
            ]
            for each, copies in engine.targets().items()
        }
    )


def check(engine: Any) -> None:
    """Every copy of every slice has its numbers, where the plan wants it."""
    tensors, targets = engine.tensors(), engine.targets()
    whole = {key: numbers(key, tensor) for key, tensor in tensors.items()}
    for each, copies in engine.slices().items():
        for array, like in zip(copies, targets[each], strict=True):
            assert array.sharding == like.sharding, each
            assert array.dtype == tensors[each.key].dtype, each
            want = whole[each.key][index(each.box)]
            np.testing.assert_array_equal(array, want, err_msg=str(each))
