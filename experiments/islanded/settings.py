"""What the islands' benchmark trains, where, and by which plans.

Setting -> experiment, chain; card kind -> cluster, plan
"""

import dataclasses
from typing import Any

import optax

from experiments import llama_1b
from experiments.bench_mixed import remembering
from experiments.common import next_token
from experiments.emulated.cards import PAIR
from hexijax.cluster import Cluster
from hexijax.data import RandomTokens
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Plan, Replica, Schedule, Stage
from models.llama import Llama, LlamaConfig

CPU_KIND = "host-cpu"
CPU = f"""\
[kinds.{CPU_KIND}]
vendor = "cpu"
memory_gib = 16
peak_tflops = {{ float32 = 0.5 }}
memory_gb_per_s = 50
host_link_gb_per_s = 50
source = "declared"
"""

SLOW = next(card for card in PAIR.cards if card.hold.multiprocessors)
"""The second card, where cards are made unlike."""

MIXED_STEPS = 20
MIXED_ON_CPU = 2
"""Layers of the small Llama that the CPU holds."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model in two stages."""

    experiment: Experiment
    """What is trained."""

    first: int
    """Layers of the first stage; the head costs as much as a block and a third."""

    first_beside_slow: int
    """The same where the second card is ``SLOW``: both stages take as long again."""

    microbatch: int
    """Sequences."""

    steps: int
    """That are measured, after two."""

    sizes: tuple[int, ...]
    """Bytes of messages that are timed."""


def small() -> Setting:
    """For CPU devices."""
    config = LlamaConfig(
        vocab_size=256, width=64, depth=4, num_heads=4, num_kv_heads=4, ff_width=128
    )
    made = Experiment(
        name="llama_small",
        loss=next_token(Llama, config),
        optimizer=optax.adamw(1e-3),
        clip_norm=1.0,
        data=RandomTokens(256, 32),
        batch_size=32,
        tokens_per_sample=32,
    )
    return Setting(
        experiment=made,
        first=3,
        first_beside_slow=4,
        microbatch=4,
        steps=3,
        sizes=(4096, 2**20, 2**24),
    )


def large() -> Setting:
    """Llama of 1.35 B, 64 sequences a step."""
    made = dataclasses.replace(llama_1b.experiment(), batch_size=64)
    sizes = (4096, 2**20, 2**24, 2**26, 2**28)
    return Setting(
        experiment=made,
        first=14,
        first_beside_slow=17,
        microbatch=4,
        steps=6,
        sizes=sizes,
    )


def cluster(
    kind: str,
    second: str | None = None,
    *,
    slow: bool = False,
    gb_per_s: float = 4.0,
    latency_us: float = 200.0,
    rows: tuple[Any, ...] = (),
) -> Cluster:
    """Two nodes with a device each, and so two islands.

    Args:
        kind: of the first device.
        second: of the other; None: the same.
        slow: the other is a ``SLOW`` one of ``kind``.
        gb_per_s: between them.
        latency_us: between them.
        rows: ``layer_times`` of ``kind``.
    """
    declared = CPU if CPU_KIND in (kind, second) else ""
    if slow:
        second = f"{SLOW.kind}-{kind}"
        declared += f'[kinds.{second}]\nbase = "{kind}"\nspeed = {SLOW.speed}\n'
    made = Cluster.from_toml(
        f"""\
format = 1
name = "two-islands"
{declared}
[[nodes]]
name = "one"
devices = [{{ kind = "{kind}", count = 1 }}]
host_memory_gib = 96
host_cores = 8
[[nodes]]
name = "two"
devices = [{{ kind = "{second or kind}", count = 1 }}]
host_memory_gib = 96
host_cores = 8
[links]
between_nodes = {{ latency_us = {latency_us}, bandwidth_gb_per_s = {gb_per_s} }}
"""
    )
    if not rows:
        return made
    profiles = tuple(
        dataclasses.replace(made.device(name).profile, layer_times=rows)
        for name in ("one/0",)
    )
    return dataclasses.replace(made, profiles=profiles)


def pipeline(setting: Setting, chain: Chain, *, slow: bool = False) -> Plan:
    """Two stages, microbatches of the second on their way while the first computes;
    ``slow``: the second card is."""
    layers, experiment = len(chain.layers), setting.experiment
    first = setting.first_beside_slow if slow else setting.first
    cuts = ((0, first), (first, layers))
    stages = tuple(
        Stage(
            devices=(f"{node}/0",),
            layers=cut,
            dtype=experiment.dtype,
            remat=(*(Remat.DOTS,) * (cut[1] - cut[0] - 1), _last(cut[1] == layers)),
        )
        for node, cut in zip(("one", "two"), cuts, strict=True)
    )
    replica = Replica(
        stages=stages,
        microbatches=experiment.batch_size // setting.microbatch,
        microbatch_size=setting.microbatch,
        samples=experiment.batch_size,
    )
    return Plan(
        replicas=(replica,),
        batch_size=experiment.batch_size,
        schedule=Schedule.EAGER,
        chain=chain.fingerprint(),
    )


def _last(of_all: bool) -> Remat:
    """The model's last layer keeps all it has."""
    return Remat.NONE if of_all else Remat.DOTS


def mixed() -> Experiment:
    """A small Llama in fp32, which learns one batch; its optimizer keeps gradients."""
    config = LlamaConfig(
        vocab_size=512, width=256, depth=6, num_heads=4, num_kv_heads=4, ff_width=512
    )
    return Experiment(
        name="llama_mixed",
        loss=next_token(Llama, config),
        optimizer=remembering(optax.adamw(1e-3)),
        data=RandomTokens(512, 128),
        batch_size=16,
    )


def mixed_plan(chain: Chain) -> Plan:
    """Its last layers on the second device."""
    layers = len(chain.layers)
    cut = layers - MIXED_ON_CPU
    stages = (
        Stage(devices=("one/0",), layers=(0, cut)),
        Stage(devices=("two/0",), layers=(cut, layers)),
    )
    replica = Replica(stages=stages, microbatches=4, microbatch_size=4, samples=16)
    return Plan(replicas=(replica,), batch_size=16, chain=chain.fingerprint())
