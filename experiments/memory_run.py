"""One drawn plan on the card of this process: its peak, and what set it.

    Draw -> make_engine -> run -> peak, seconds of a step, programs, dispatches

A peak is counted from a process's start: a process runs one plan. Programs' bytes
are XLA's own, beside the promise; the dispatches say what was in use after each
instruction of the first step and where the peak rose.
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from experiments.memory_draws import Draw, Family, ff_width, make_chain, make_plan
from hexijax.cluster import Cluster
from hexijax.costs.memory import stage_within
from hexijax.costs.segments import segment_programs
from hexijax.experiment import Experiment
from hexijax.layers.loss import nnx_loss
from hexijax.plan.plan import stage_place
from hexijax.runtime.compiled import program_bytes
from hexijax.runtime.engine import Engine
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss


def make_engine(
    drawn: Draw, family: Family, cluster: Cluster, device: jax.Device
) -> Engine:
    """The plan compiled, nothing on the device yet; any device of the kind will do."""

    def build(rngs: Any, dtype: str = "float32", attention: str = "xla") -> Llama:
        heads = drawn["width"] // family.head
        config = LlamaConfig(
            vocab_size=family.vocab_size,
            width=drawn["width"],
            depth=drawn["depth"],
            num_heads=heads,
            num_kv_heads=heads,
            ff_width=ff_width(drawn["width"]),
            dtype=dtype,
            attention=attention,
        )
        return Llama(config, rngs=rngs)

    def score(model: Any, batch: Any) -> Any:
        return next_token_loss(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    plan = make_plan(drawn, family, cluster)
    experiment = Experiment(
        loss=nnx_loss(build, score),
        optimizer=optax.adamw(1e-4),
        batch_size=plan.batch_size,
        dtype=family.dtype,
        tokens_per_sample=drawn["length"],
    )
    chain = make_chain(drawn, family)
    return Engine(experiment, plan, chain, cluster, {cluster.devices[0].name: device})


def program_rows(engine: Engine) -> list[dict[str, Any]]:
    """Every program of the plan: bytes as promised and as compiled."""
    (replica,) = engine.plan.replicas
    (stage,) = replica.stages
    within = stage_within(engine.plan, engine.chain, engine.cluster, replica, 0)
    rows = []
    for segment in range(len(stage.segments)):
        promised = segment_programs(
            engine.chain, within, stage, segment, replica.microbatch_size
        )
        compiled = program_bytes(engine.segments[stage_place(0, 0), segment])
        for way in compiled:
            row: dict[str, Any] = {"segment": segment, "way": way}
            for field in ("arguments", "outputs", "aliases", "temp"):
                name = f"{field}_bytes"
                row[field] = [getattr(x[way], name) for x in (promised, compiled)]
            rows.append(row)
    return rows


def run(
    drawn: Draw, family: Family, cluster: Cluster, device: jax.Device
) -> dict[str, Any]:
    """Three steps; seconds are those of the last two."""
    began = time.perf_counter()
    engine = make_engine(drawn, family, cluster, device)
    compile_s = time.perf_counter() - began
    engine.init()
    at_start = _in_use(device)
    rng = np.random.default_rng(0)
    shape = (engine.plan.batch_size, drawn["length"] + 1)
    ends, dispatches = list[float](), list[Any]()
    for step in range(3):
        tokens = rng.integers(0, family.vocab_size, shape).astype(np.int32)
        left = _watch(engine, device, dispatches) if not step else None
        engine.step({"tokens": tokens}, step).fetch()
        if left:
            engine._executor.body = left
        ends.append(time.perf_counter())
    return {
        "peak_bytes": _in_use(device)["peak"],
        "start": at_start,
        "end": _in_use(device),
        "programs": program_rows(engine),
        "dispatches": dispatches,
        "measured_s": (ends[2] - ends[0]) / 2,
        "compile_s": compile_s,
        "jax": jax.__version__,
        "card": device.device_kind,
    }


def _in_use(device: jax.Device) -> Mapping[str, int]:
    stats = device.memory_stats() or {}
    return {
        "now": stats.get("bytes_in_use", 0),
        "peak": stats.get("peak_bytes_in_use", 0),
    }


def _watch(engine: Engine, device: jax.Device, seen: list[Any]) -> list[Any]:
    """Has each action of the next step note what is in use; returns the plain ones."""
    executor = engine._executor
    plain = executor.body

    def watched(action: Any, what: str) -> Any:
        def then_note(slots: Any) -> None:
            action(slots)
            seen.append([what, *_in_use(device).values()])

        return then_note

    executor.body = [
        watched(action, f"{type(instruction).__name__} {_where(instruction)}")
        for action, instruction in zip(plain, engine.program.body, strict=True)
    ]
    return plain


def _where(instruction: Any) -> str:
    fields = ("segment", "group", "microbatches", "microbatch")
    return " ".join(
        f"{f[:5]} {getattr(instruction, f)}" for f in fields if hasattr(instruction, f)
    )
