"""How fast the runtime is on equal cards, beside a plain-JAX script of the same model.

Run:     python -m experiments.bench_llama one pipeline lanes mixed --out FOLDER
         (--small, to see that it works, runs all of it on CPU devices; force four with
         XLA_FLAGS=--xla_force_host_platform_device_count=4)
Needs:   1 or 4 cards of 80 GB; about six minutes on 4x H100
Expect:  docs/performance.md
"""

import argparse
import dataclasses
import datetime
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from experiments.peers.plain_llama import PlainLlama, stage_times
from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain, Remat
from hexijax.layers.kernels import trace_chain
from hexijax.layers.loss import nnx_loss
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.runtime.engine import Engine
from hexijax.runtime.intake import abstract_params
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured."""

    config: LlamaConfig
    length: int
    a_card: int
    """Sequences a card and step."""
    microbatch: int
    """Sequences in a microbatch of one card."""
    pipeline_microbatch: int
    kind: str
    steps: int

    @property
    def dtype(self) -> str:
        """Compute dtype, by name."""
        return jax.numpy.dtype(self.config.dtype).name


LARGE = Size(
    config=LlamaConfig(
        vocab_size=32_000,
        width=2048,
        depth=24,
        num_heads=16,
        num_kv_heads=16,
        ff_width=5504,
        dtype="bfloat16",
        attention="cudnn",
    ),
    length=2048,
    a_card=16,
    microbatch=8,
    pipeline_microbatch=4,
    kind="h100-80g-sxm",
    steps=8,
)
SMALL = Size(
    config=LlamaConfig(
        vocab_size=256,
        width=64,
        depth=8,
        num_heads=4,
        num_kv_heads=4,
        ff_width=128,
        attention="xla",
    ),
    length=32,
    a_card=16,
    microbatch=8,
    pipeline_microbatch=4,
    kind="cpu-fast",
    steps=3,
)


def step_flops(size: Size, samples: int) -> float:
    """Model FLOPs of a step: 6 a parameter and token, and causal attention's half."""
    config = size.config
    a_token = 6 * config.num_params + 6 * config.depth * config.width * size.length
    return samples * size.length * a_token


def optimizer() -> optax.GradientTransformation:
    """Adam as in the PyTorch script beside it."""
    return optax.adamw(1e-4, weight_decay=0.01)


def make_experiment(size: Size, batch_size: int) -> Experiment:
    """The same model for our runtime."""

    def build(rngs: Any, dtype: str = "float32", attention: str = "xla") -> Llama:
        config = dataclasses.replace(size.config, dtype=dtype, attention=attention)
        return Llama(config, rngs=rngs)

    def score(model: Any, batch: Any) -> Any:
        return next_token_loss(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    return Experiment(
        loss=nnx_loss(build, score),
        optimizer=optimizer(),
        batch_size=batch_size,
        dtype=size.dtype,
        tokens_per_sample=size.length,
    )


def make_chain(size: Size) -> Chain:
    """The model as a chain."""
    experiment = make_experiment(size, 1)
    batch = {"tokens": np.zeros((1, size.length + 1), np.int32)}
    return trace_chain(
        experiment.loss,
        abstract_params(experiment),
        batch,
        dtype=size.dtype,
        name="llama",
        tokens_per_sample=size.length,
    )


def make_cluster(size: Size, cards: int) -> Cluster:
    """``cards`` equal cards in one node."""
    folder = Path(__file__).parent / "clusters"
    name = "h100_x4.toml" if size.kind == LARGE.kind else "quickstart.toml"
    return Cluster.from_toml((folder / name).read_text())


def batches(size: Size, samples: int) -> Callable[[], np.ndarray]:
    """Random tokens, new ones each step."""
    rng = np.random.default_rng(0)
    shape = (samples, size.length + 1)
    return lambda: rng.integers(0, size.config.vocab_size, shape).astype(np.int32)


def measure(
    step: Callable[[int], Callable[[], Any]], steps: int, *, warm: int = 2
) -> dict[str, float]:
    """Seconds between the ends of consecutive steps, each dispatched one ahead.

    ``step`` dispatches and returns what waits for it; ``warm`` steps go before.
    """
    for i in range(warm):
        step(i)()
    ends: list[float] = []
    waiting: list[Callable[[], Any]] = []
    for i in range(steps + 1):
        waiting.append(step(2 + i))
        if len(waiting) > 1:
            waiting.pop(0)()
            ends.append(time.perf_counter())
    loss = waiting.pop(0)()
    times = [b - a for a, b in itertools.pairwise(ends)]
    return {
        "step_s": statistics.median(times),
        "least_s": min(times),
        "most_s": max(times),
        "loss": float(loss["loss"] if isinstance(loss, dict) else loss),
    }


def run_plain(size: Size, device: jax.Device, microbatch: int) -> dict[str, float]:
    """One card, plain JAX."""
    count = size.a_card // microbatch
    config = size.config
    plain = PlainLlama(config, optimizer(), microbatch, count, device)
    plain.init()
    batch = batches(size, size.a_card)

    def step(i: int) -> Callable[[], Any]:
        total = plain.step(batch())
        return lambda: float(total)

    return measure(step, size.steps)


def run_plan(
    size: Size, chain: Chain, plan: Plan, cards: int, trace: Path | None = None
) -> dict[str, Any]:
    """One plan, our runtime; ``trace`` is where three more steps' profile goes."""
    experiment = make_experiment(size, plan.batch_size)
    cluster = make_cluster(size, cards)
    names = [d.name for d in cluster.devices][:cards]
    devices = dict(zip(names, jax.devices(), strict=False))
    began = time.perf_counter()
    engine = Engine(experiment, plan, chain, cluster, devices)
    compile_s = time.perf_counter() - began
    engine.init()
    batch = batches(size, plan.batch_size)

    def step(i: int) -> Callable[[], Any]:
        return engine.step({"tokens": batch()}, i).fetch

    result = measure(step, size.steps)
    began = time.perf_counter()
    waiting = [step(100), step(101)]
    dispatch_s = (time.perf_counter() - began) / 2
    for wait in waiting:
        wait()
    if trace is not None:
        with jax.profiler.trace(str(trace)):
            for wait in [step(200 + i) for i in range(3)]:
                wait()
    peaks = engine.peak_bytes_by_device()
    return {
        **result,
        "compile_s": compile_s,
        "dispatch_s": dispatch_s,
        "peak_gib": max(peaks.values(), default=0) / 2**30,
    }


def names_of(size: Size, cards: int) -> tuple[str, ...]:
    """Device names of the first cards."""
    return tuple(d.name for d in make_cluster(size, cards).devices)[:cards]


def data_parallel(size: Size, chain: Chain, cards: int) -> Plan:
    """One stage over all cards, a lane each."""
    layers = len(chain.layers)
    stage = Stage(
        devices=names_of(size, cards),
        layers=(0, layers),
        lanes=cards,
        dtype=size.dtype,
    )
    samples = size.a_card * cards
    replica = Replica(
        stages=(stage,),
        microbatches=size.a_card // size.microbatch,
        microbatch_size=size.microbatch * cards,
        samples=samples,
    )
    return Plan(replicas=(replica,), batch_size=samples, chain=chain.fingerprint())


def pipeline(size: Size, chain: Chain, blocks: tuple[int, ...]) -> Plan:
    """One stage a card; the embedding goes with the first, the head with the last."""
    stages: list[Stage] = []
    start = 0
    for i, (name, count) in enumerate(zip(names_of(size, 4), blocks, strict=True)):
        stop = start + count + (i == 0) + (i == len(blocks) - 1)
        # The last stage runs forward and backward at once and keeps nothing.
        remat = Remat.NONE if i == len(blocks) - 1 else Remat.DOTS
        stages.append(
            Stage(
                devices=(name,),
                layers=(start, stop),
                dtype=size.dtype,
                remat=(remat,) * (stop - start),
            )
        )
        start = stop
    samples = size.a_card * 4
    replica = Replica(
        stages=tuple(stages),
        microbatches=samples // size.pipeline_microbatch,
        microbatch_size=size.pipeline_microbatch,
        samples=samples,
    )
    return Plan(replicas=(replica,), batch_size=samples, chain=chain.fingerprint())


def ideal_1f1b_s(times: list[tuple[float, float]], microbatches: int) -> float:
    """Seconds of 1F1B when nothing but the stages' own work takes time."""
    num_stages = len(times)
    done: dict[tuple[str, int, int], float] = {}
    orders = []
    for s in range(num_stages):
        warm = min(num_stages - s, microbatches)
        order = [("F", m) for m in range(warm)]
        for m in range(microbatches):
            order.append(("B", m))
            if warm + m < microbatches:
                order.append(("F", warm + m))
        orders.append(order)
    clock, at = [0.0] * num_stages, [0] * num_stages
    while any(at[s] < len(orders[s]) for s in range(num_stages)):
        for s in range(num_stages):
            while at[s] < len(orders[s]):
                what, m = orders[s][at[s]]
                before = ("F", s - 1, m) if what == "F" else ("B", s + 1, m)
                if what == "B" and s == num_stages - 1:
                    before = ("F", s, m)
                if 0 <= before[1] < num_stages and before not in done:
                    break
                start = max(clock[s], done.get(before, 0.0))
                clock[s] = start + times[s][0 if what == "F" else 1]
                done[what, s, m] = clock[s]
                at[s] += 1
    return max(clock)


def run_mixed(size: Size) -> dict[str, float]:
    """A card and the CPU in one process: gradients beside the plain program, fp32."""
    from experiments.bench_mixed import gradient_error

    return gradient_error()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "what", nargs="+", choices=["one", "lanes", "pipeline", "mixed"]
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--trace", action="store_true", help="profile plans, too")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_llama"))
    args = parser.parse_args()
    size = SMALL if args.small else LARGE
    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {
        "what": {
            "card": jax.devices()[0].device_kind,
            "cards": len(jax.devices()),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "command": "python -m experiments.bench_llama " + " ".join(sys.argv[1:]),
        }
    }

    def keep(name: str, result: dict[str, Any], samples: int) -> None:
        if "step_s" in result:
            flops = step_flops(size, samples)
            result["tokens_per_s"] = samples * size.length / result["step_s"]
            result["model_tflops"] = flops / result["step_s"] / 1e12
        rows[name] = result
        print(f"{name:24}", json.dumps(result), flush=True)
        (args.out / "bench_llama.json").write_text(json.dumps(rows, indent=1))
        gc.collect()

    def trace(name: str) -> Path | None:
        return args.out / name if args.trace else None

    began = time.perf_counter()
    chain = make_chain(size)
    print(f"chain of {len(chain.layers)} layers in {time.perf_counter() - began:.1f} s")
    if "one" in args.what:
        keep("plain", run_plain(size, jax.devices()[0], size.microbatch), size.a_card)
        whole = data_parallel(size, chain, 1)
        keep("one card", run_plan(size, chain, whole, 1), size.a_card)
        keep(
            "plain again",
            run_plain(size, jax.devices()[0], size.microbatch),
            size.a_card,
        )
    if "lanes" in args.what:
        lanes = data_parallel(size, chain, 4)
        keep(
            "4 lanes", run_plan(size, chain, lanes, 4, trace("lanes")), 4 * size.a_card
        )
    if "pipeline" in args.what:
        depth = size.config.depth
        part = depth // 4
        blocks = (part, part, part, depth - 3 * part)
        spans: list[tuple[int, int]] = []
        start = 0
        for count in blocks:
            spans.append((start, start + count))
            start += count
        tokens = batches(size, size.pipeline_microbatch)()
        plan = pipeline(size, chain, blocks)
        result = run_plan(size, chain, plan, 4, trace("pipeline"))
        microbatches = plan.replicas[0].microbatches
        times = stage_times(
            size.config, spans, tokens, jax.devices()[0], 4, microbatches
        )
        for how, each in times.items():
            ideal_s = ideal_1f1b_s(each, microbatches)
            result[f"stages_{how}_s"] = each
            result[f"ideal_{how}_s"] = ideal_s
            result[f"fraction_of_ideal_{how}"] = ideal_s / result["step_s"]
        keep("pipeline of 4", result, 4 * size.a_card)
    if "mixed" in args.what:
        keep("card and CPU", run_mixed(size), 0)


if __name__ == "__main__":
    main()
