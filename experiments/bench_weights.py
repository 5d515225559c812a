"""What a host holds while the weights of a model of 1 B parameters come in and go out.

Run:     python -m experiments.bench_weights
Needs:   some 12 GiB of memory, which stands for the devices', and 15 GB of disk
Expect:  every figure below 1.3 of the largest layer

A bfloat16 file with Hugging Face's names goes into a pipeline of four CPU devices; the
run is saved, exported as such a file and as an Orbax folder; the folder goes in again.
Another process samples this one's anonymous memory (``RssAnon``), which leaves mapped
files out, every millisecond. Going out there are no devices: the figure is what is
above the start. Coming in, devices' memory is this host's: the arrays that have arrived
are taken off, the one on its way included, once it is in place. NumPy's own peak, as
``tracemalloc`` counts it, is told beside it: it knows of no device and no TensorStore.
"""

import argparse
import bisect
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hexijax.weights import Orbax, Safetensors, export, write_safetensors
from hexijax.weights.source import Box, Source, Tensor, box_shape

Figures = dict[str, Any]

PHASES = ("make", "in", "out", "back")
LIMIT = 1.3
SAMPLER = """
import sys, time
pid = sys.argv[1]
print("ready", flush=True)
while True:
    try:
        text = open(f"/proc/{pid}/status").read()
        at = text.index("RssAnon:")
        print(time.time(), int(text[at + 8 :].split()[0]) * 1024, flush=True)
    except (OSError, ValueError, BrokenPipeError):
        break
    time.sleep(0.001)
"""


@dataclasses.dataclass
class Samples:
    """Anonymous memory of this process over a while."""

    times_s: list[float] = dataclasses.field(default_factory=list)
    num_bytes: list[int] = dataclasses.field(default_factory=list)

    def peak(self, start_s: float, stop_s: float) -> int:
        """The most in a while; 0 if it was too short to be seen."""
        a, b = (bisect.bisect(self.times_s, t) for t in (start_s, stop_s))
        return max(self.num_bytes[a:b], default=0)


@contextlib.contextmanager
def sampled(file: Path) -> Generator[Samples]:
    """Samples this process while the block runs; they are there when it is over."""
    pid = str(os.getpid())
    samples = Samples()
    with file.open("w") as out:
        sampler = subprocess.Popen([sys.executable, "-c", SAMPLER, pid], stdout=out)
        try:
            while "\n" not in file.read_text():
                time.sleep(0.01)
            time.sleep(0.05)
            yield samples
        finally:
            sampler.terminate()
            sampler.wait()
    for line in file.read_text().splitlines()[1:]:
        when, _, size = line.partition(" ")
        if size:
            samples.times_s.append(float(when))
            samples.num_bytes.append(int(size))


class Drawn(Source):
    """Random bfloat16 numbers, made as they are read."""

    where = "numbers that are drawn"

    def __init__(self, tensors: Mapping[str, Tensor]):
        half = np.dtype(ml_dtypes.bfloat16)
        self._tensors = {name: Tensor(t.shape, half) for name, t in tensors.items()}
        self._block = np.random.default_rng(0).normal(0, 0.02, 10**6).astype(half)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def read(self, name: str, box: Box) -> np.ndarray:
        return np.resize(self._block, box_shape(box))


class Watched(Source):
    """A source that remembers when it was asked for what."""

    def __init__(self, source: Source, item_bytes: int):
        self._source, self._item_bytes = source, item_bytes
        self.reads: list[tuple[float, int]] = []
        """When each read began, and bytes of the array that it becomes."""

    @property
    def where(self) -> str:
        return self._source.where

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._source.tensors

    def read(self, name: str, box: Box) -> np.ndarray:
        size = self._item_bytes * int(np.prod(box_shape(box)))
        self.reads.append((time.time(), size))
        return self._source.read(name, box)


def experiment(depth: int) -> Any:
    """A Llama of 1 B parameters, which is never trained."""
    import optax

    from experiments.common import next_token
    from hexijax.data import RandomTokens
    from hexijax.experiment import Experiment
    from models.llama import Llama, LlamaConfig
    from models.sizes import get_config

    config = get_config("llama", "1.35B", depth=depth)
    assert isinstance(config, LlamaConfig)
    return Experiment(
        loss=next_token(Llama, config),
        optimizer=optax.sgd(0.1),
        data=RandomTokens(config.vocab_size, 16),
        batch_size=1,
    )


def largest_layer_bytes(depth: int) -> tuple[int, int]:
    """Of the model in float32, and how many parameters it has."""
    from hexijax.job.intake import trace_chain

    chain = trace_chain(experiment(depth))
    sizes = {
        group.name: sum(int(np.prod(leaf.shape)) for leaf in group.leaves)
        for group in chain.groups
    }
    layers = (sum(sizes[name] for name in x.groups) for x in chain.layers)
    return 4 * max(layers), sum(sizes.values())


def bring_in(source: Source, depth: int, folder: Path, *, save: bool) -> Figures:
    """Into four stages; the run is saved after it."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from hexijax.checkpoint import Saver, Tiers
    from hexijax.cluster import Cluster
    from hexijax.job.intake import trace_chain
    from hexijax.job.machine import make_machine
    from hexijax.plan.plan import Plan, Replica, Stage
    from hexijax.weights.stored.files import open_files

    job = experiment(depth)
    cluster = Cluster.from_toml("experiments/clusters/quickstart.toml")
    chain = trace_chain(job)
    edges = [len(chain.layers) * i // 4 for i in range(5)]
    stages = tuple(
        Stage(
            devices=(f"fast/{i}",),
            layers=(edges[i], edges[i + 1]),
            segments=(1,) * (edges[i + 1] - edges[i]),
        )
        for i in range(4)
    )
    replica = Replica(stages=stages, microbatches=1, microbatch_size=1, samples=1)
    plan = Plan(replicas=(replica,), batch_size=1)
    engine = make_machine(job, cluster, chain, plan).engine
    watched = Watched(source.fitted(model_shapes(job)), item_bytes=4)
    tracemalloc.start()
    with sampled(folder / "samples.txt") as samples:
        began_s = time.time()
        engine.set_params(watched)
        ended_s = time.time()
    _, numpy_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first_bytes = samples.peak(0.0, began_s)
    arrived, above = 0, 0
    starts = [when for when, _ in watched.reads]
    for (start_s, size), stop_s in zip(
        watched.reads, [*starts[1:], ended_s], strict=True
    ):
        arrived += size
        above = max(above, samples.peak(start_s, stop_s) - first_bytes - arrived)
    if save:
        files = open_files(folder / "run" / "checkpoints")
        Saver(engine, Tiers(fast=files)).save(1)
    return {
        "arrays_bytes": arrived,
        "above_bytes": above,
        "numpy_bytes": numpy_bytes,
        "seconds": ended_s - began_s,
        "samples": len(samples.num_bytes),
    }


def model_shapes(job: Any) -> dict[str, Tensor]:
    """The parameters of an experiment, by name."""
    from hexijax.layers.names import flatten

    return {
        name: Tensor(tuple(x.shape), np.dtype(x.dtype))
        for name, x in flatten(job.loss.abstract_params()).items()
    }


def send_out(folder: Path) -> Figures:
    """As a file with Hugging Face's names, and as an Orbax folder."""
    import tensorstore  # noqa: F401

    found = {}
    for to, names in (("safetensors", "llama"), ("orbax", None)):
        with sampled(folder / "samples.txt") as samples:
            began_s = time.time()
            written = export(
                folder / "run",
                to,
                out=folder / f"out-{to}",
                names=names,
                dtype=DTYPES[to],
            )
            ended_s = time.time()
        first_bytes = samples.peak(0.0, began_s)
        found[to] = {
            "file_bytes": written.num_bytes,
            "above_bytes": samples.peak(began_s, ended_s) - first_bytes,
            "seconds": ended_s - began_s,
            "samples": len(samples.num_bytes),
        }
    return found


DTYPES = {"safetensors": "came-as", "orbax": "float32"}


def same(a: Source, b: Source) -> bool:
    """Whether two sources hold the same numbers."""
    return a.tensors == b.tensors and all(
        np.array_equal(a.read(name, box), b.read(name, box))
        for name in a.tensors
        for box in a.windows(name)
    )


def phase(name: str, folder: Path, depth: int) -> Figures:
    """One of ``PHASES``, in a process of its own."""
    made = folder / "in.safetensors"
    match name:
        case "make":
            job = experiment(depth)
            write_safetensors(made, Drawn(model_shapes(job)), "llama")
            layer_bytes, params = largest_layer_bytes(depth)
            return {"largest_layer_bytes": layer_bytes, "params": params}
        case "in":
            source = Safetensors(made, names="llama")
            return bring_in(source, depth, folder, save=True)
        case "out":
            found = send_out(folder)
            there = Safetensors(folder / "out-safetensors")
            assert same(Safetensors(made), there), "what came in went out"
            return found
        case _:
            return bring_in(Orbax(folder / "out-orbax"), depth, folder, save=False)


def main() -> None:
    """All phases, and what they say of the largest layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=18, help="blocks of the model")
    parser.add_argument("--folder", type=Path, help="kept; else a temporary one")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        made = phase(arguments.phase, arguments.folder, arguments.depth)
        print(json.dumps(made))
        return
    with contextlib.ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        run = functools.partial(_run, folder, arguments.depth)
        facts, came, went, back = map(run, PHASES)
    layer = facts["largest_layer_bytes"]
    print(
        f"{facts['params'] / 1e9:.2f} B parameters, largest layer "
        f"{layer / 2**20:.0f} MiB in float32"
    )
    rows = {
        "in, bfloat16 safetensors": came,
        "in, Orbax": back,
        "out, bfloat16 safetensors": went["safetensors"],
        "out, float32 Orbax": went["orbax"],
    }
    for what, found in rows.items():
        more = ""
        if "numpy_bytes" in found:
            more = f"; NumPy's peak {found['numpy_bytes'] / layer:.2f}"
        print(
            f"{what:26} {found['above_bytes'] / layer:.2f} of it{more} "
            f"({found['seconds']:.0f} s)"
        )
    worst = max(
        max(found["above_bytes"], found.get("numpy_bytes", 0))
        for found in rows.values()
    )
    sys.exit(worst >= LIMIT * layer)


def _run(folder: Path, depth: int, name: str) -> Figures:
    command = [sys.executable, "-m", "experiments.bench_weights", "--phase", name]
    command += ["--folder", str(folder), "--depth", str(depth)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
