"""What the planner promises of each segment's programs, beside what XLA says.

Run:     python -m experiments.memory_table [MODEL ...] [--dtype float32] [--length 144]
         python -m experiments.memory_table --card h100-80g-sxm --width 1024
Needs:   two forced CPU devices (it asks for them), about a minute; for a card only its
         plugin (`jax[cuda13]`), see `experiments.deviceless`
Expect:  held (arguments + outputs - aliases) within 2%, temp never above its promise
"""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

from experiments import deviceless

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    if "--card" in sys.argv:
        deviceless.set_flags()

import jax
import numpy as np
import optax

from hexijax.cluster import (
    Cluster,
    DeviceGroup,
    DeviceProfile,
    LinkProfile,
    Links,
    Node,
)
from hexijax.costs.activations import Within, is_joined
from hexijax.costs.compute import fused_attention
from hexijax.costs.segments import ProgramBytes, segment_programs
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain, Remat
from hexijax.layers.kernels import trace_chain
from hexijax.layers.loss import linen_loss, nnx_loss
from hexijax.plan.plan import Plan, Replica, Stage, stage_place
from hexijax.runtime.compiled import program_bytes
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine, abstract_params
from models.bert import Bert, BertConfig
from models.gpt import GPT, GPTConfig
from models.linen_gpt import LinenGPT
from models.llama import Llama, LlamaConfig
from models.losses import classification_loss, masked_token_loss, next_token_loss
from models.vit import ViT, ViTConfig

MODELS = ("llama", "gpt2", "bert", "vit", "linen_gpt")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the models, and of what they compute with."""

    dtype: str = "float32"
    length: int = 144
    """A square: of an image's patches too."""

    width: int = 128
    depth: int = 4
    samples: int = 2
    card: str | None = None
    """Of the catalog; None: CPU."""

    @property
    def shape(self) -> dict[str, Any]:
        """Of a block."""
        heads = max(4, self.width // 64)
        return {
            "width": self.width,
            "depth": self.depth,
            "num_heads": heads,
            "ff_width": 4 * self.width,
        }

    @property
    def vocab_size(self) -> int:
        """Four times the width."""
        return 4 * self.width


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One compiled program."""

    segment: str
    """Place, layers and remat."""

    way: str
    """``forward``, ``backward`` or ``fused``."""

    promised: ProgramBytes
    """By formula."""

    compiled: ProgramBytes
    """By XLA."""

    @property
    def held_ratio(self) -> float:
        """Promised over compiled, of arguments and outputs."""
        return self.promised.held_bytes / max(1, self.compiled.held_bytes)

    @property
    def temp_ratio(self) -> float:
        """Promised over compiled, of what is alive within."""
        return self.promised.temp_bytes / max(1, self.compiled.temp_bytes)


def make_experiment(
    name: str, sizes: Sizes
) -> tuple[Experiment, dict[str, np.ndarray]]:
    """A small model of a family, and a batch of one."""
    length, shape, vocab_size = sizes.length, sizes.shape, sizes.vocab_size
    tokens = np.zeros((1, length), np.int32)

    def next_token(model: Any, batch: Any) -> Any:
        return next_token_loss(model(batch["tokens"]), batch["tokens"])

    def masked(model: Any, batch: Any) -> Any:
        logits = model(batch["tokens"])
        return masked_token_loss(logits, batch["tokens"], batch["masked"])

    def classify(model: Any, batch: Any) -> Any:
        return classification_loss(model(batch["images"]), batch["labels"])

    decoder: dict[str, Any] = {"vocab_size": vocab_size, "max_length": length}
    decoder |= shape
    image = int(length**0.5) * 4
    cases: dict[str, tuple[Any, Any, Any, dict[str, np.ndarray]]] = {
        "llama": (
            Llama,
            LlamaConfig(vocab_size=vocab_size, num_kv_heads=2, **shape),
            next_token,
            {"tokens": tokens},
        ),
        "gpt2": (GPT, GPTConfig(**decoder), next_token, {"tokens": tokens}),
        "bert": (
            Bert,
            BertConfig(**decoder),
            masked,
            {"tokens": tokens, "masked": tokens > 0},
        ),
        "vit": (
            ViT,
            ViTConfig(num_classes=10, image_size=image, patch_size=4, **shape),
            classify,
            {
                "images": np.zeros((1, image, image, 3), np.float32),
                "labels": np.zeros((1,), np.int32),
            },
        ),
        "linen_gpt": (LinenGPT, GPTConfig(**decoder), next_token, {"tokens": tokens}),
    }
    module, config, score, batch = cases[name]

    def configured(dtype: str, attention: str | None) -> Any:
        return dataclasses.replace(config, dtype=dtype, attention=attention)

    def nnx(rngs: Any, dtype: str = "float32", attention: str | None = None) -> Any:
        return module(configured(dtype, attention), rngs=rngs)

    def linen(dtype: str = "float32", attention: str | None = None) -> Any:
        return module(configured(dtype, attention))

    is_linen = name == "linen_gpt"
    loss = linen_loss(linen, score, example=batch) if is_linen else nnx_loss(nnx, score)
    made = Experiment(
        name=name,
        loss=loss,
        optimizer=optax.adamw(1e-3),
        batch_size=2 * sizes.samples,
        dtype=sizes.dtype,
        tokens_per_sample=length,
    )
    return made, batch


@functools.cache
def make_cluster(card: str | None = None, count: int = 2) -> Cluster:
    """Cards of a kind, or CPU devices that compute in any dtype."""
    cpu = DeviceProfile(
        kind="cpu",
        vendor="cpu",
        nominal_memory_bytes=2**33,
        dense_flops_per_s={"float32": 1e11, "bfloat16": 1e11},
        memory_bytes_per_s=1e10,
        host_link_bytes_per_s=1e10,
    )
    link = LinkProfile(latency_s=1e-5, bytes_per_s=1e9)
    node = Node(
        name="n",
        devices=(DeviceGroup(kind=card or "cpu", count=count),),
        host_memory_bytes=2**34,
        host_cores=2,
    )
    return Cluster(
        name=card or "cpu",
        nodes=(node,),
        links=Links(in_node=link, between_nodes=link),
        profiles=() if card else (cpu,),
    )


def two_stages(chain: Chain, cluster: Cluster, sizes: Sizes, remat: Remat) -> Plan:
    """Half the layers each: the first stage runs both ways apart, the last at once."""
    layers, half = len(chain.layers), len(chain.layers) // 2
    stages = tuple(
        Stage(
            devices=(device.name,),
            layers=span,
            dtype=sizes.dtype,
            remat=(remat,) * (span[1] - span[0]),
        )
        for device, span in zip(
            cluster.devices, ((0, half), (half, layers)), strict=True
        )
    )
    replica = Replica(
        stages=stages,
        microbatches=2,
        microbatch_size=sizes.samples,
        samples=2 * sizes.samples,
    )
    return Plan(replicas=(replica,), batch_size=2 * sizes.samples)


def rows(name: str, sizes: Sizes, remat: Remat) -> Iterator[Row]:
    """Every program of a model cut in two, promised and compiled."""
    experiment, batch = make_experiment(name, sizes)
    cluster = make_cluster(sizes.card)
    chain = trace_chain(
        experiment.loss,
        abstract_params(experiment),
        batch,
        dtype=sizes.dtype,
        name=name,
    )
    plan = two_stages(chain, cluster, sizes, remat)
    if sizes.card:
        cards = deviceless.compile_only(sizes.card, 2)
        names = [device.name for device in cluster.devices]
        devices = dict(zip(names, cards, strict=True))
    else:
        devices = assign(cluster, emulate=True)
    engine = Engine(experiment, plan, chain, cluster, devices)
    replica = plan.replicas[0]
    for s, stage in enumerate(replica.stages):
        profile = cluster.device(stage.devices[0]).profile
        fused = fused_attention(profile, stage.dtype)
        within = Within(
            profile=profile,
            layers=chain.layers_under(fused_attention=fused),
            joined=is_joined(plan.schedule, replica, s, len(stage.segments) - 1),
        )
        for g in range(len(stage.segments)):
            promised = segment_programs(chain, within, stage, g, sizes.samples)
            compiled = program_bytes(engine.segments[stage_place(0, s), g])
            assert promised.keys() == compiled.keys(), (promised, compiled)
            first, stop = stage.segment_layers(g)
            for way in promised:
                yield Row(
                    segment=f"{name} {first}-{stop - 1} {remat}",
                    way=way,
                    promised=promised[way],
                    compiled=compiled[way],
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    for field in dataclasses.fields(Sizes):
        kind = int if isinstance(field.default, int) else str
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    args = parser.parse_args()
    sizes = Sizes(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Sizes)})
    print(f"JAX {jax.__version__}, {sizes}")
    head = ("program", "held MiB", "promised", "ratio", "temp MiB", "promised", "ratio")
    print("{:28} {:>10} {:>10} {:>6} {:>10} {:>10} {:>6}".format(*head))
    for name in args.models:
        for remat in Remat:
            for row in rows(name, sizes, remat):
                one, other = row.compiled, row.promised
                print(
                    f"{row.segment + ' ' + row.way:28} "
                    f"{one.held_bytes / 2**20:10.3f} {other.held_bytes / 2**20:10.3f} "
                    f"{row.held_ratio:6.3f} "
                    f"{one.temp_bytes / 2**20:10.3f} {other.temp_bytes / 2**20:10.3f} "
                    f"{row.temp_ratio:6.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
