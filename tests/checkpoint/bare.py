"""Engines without programs: the state of a plan, where the plan wants it.

Whatever an engine says and takes of its state is the engine's own code; nothing is
compiled, so that hundreds of plans can be saved and restored.
"""

import dataclasses
import types
from typing import Any

import optax

from hexijax.plan.plan import Plan
from hexijax.runtime import engine as engine_module
from hexijax.runtime import tracing
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from hexijax.runtime.reach import Reach
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

    def settle(self) -> None:
        pass


def bare(case: cases.Case, monkeypatch: Any) -> Engine:
    """The engine of a case without its programs or values."""
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    # What a lane's microbatch holds matters to programs, not to state.
    frozen = cases.chain(case.shape).frozen
    trace = cases._traced(cases.model(case.shape)[0], 2, False, frozen)
    monkeypatch.setattr(tracing, "trace_model", lambda *args, **fields: trace)
    monkeypatch.setattr(engine_module, "Executor", lambda program, parts: Shelf())
    # What the optimizer is and what it trains is the same for every plan of a model.
    monkeypatch.setattr(engine_module, "frozen_names", lambda *args: frozen)
    monkeypatch.setattr(
        engine_module, "classify", lambda *args, **fields: Reach.ELEMENTWISE
    )
    monkeypatch.setattr(Engine, "_add", lambda *args, **fields: None)
    nothing = types.SimpleNamespace(segments={})
    monkeypatch.setattr(Engine, "_parts", lambda *args: nothing)
    job = cases.experiment(case.shape, case.clipped)
    job = dataclasses.replace(job, optimizer=optax.adam(1e-3))
    plan: Plan = case.plan
    return Engine(
        job, plan, cases.chain(case.shape), cases.cluster(), assign(cases.cluster())
    )
