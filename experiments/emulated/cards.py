"""What is emulated: the cards, and the model that trains on them.

Setting -> cluster(rows by kind, link) -> Cluster
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bench_llama import LARGE as MODEL
from experiments.bench_llama import SMALL as SMALL_MODEL
from experiments.bench_llama import Size
from experiments.emulated.slowing import Hold
from hexijax.cluster import Cluster
from hexijax.layers.chain import Remat

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One card as it is made."""

    kind: str
    """Its name in the cluster file; cards of a kind are made alike."""

    hold: Hold
    """What is kept of it."""

    speed: float
    """Of a free card: what holding is known to leave."""

    memory_gib: float
    """Its cap."""

    a_step: int
    """Sequences a step when it is alone."""

    sizes: tuple[int, ...]
    """Microbatches that are measured when it is alone, the likeliest first."""

    remats: tuple[Remat, ...] = (Remat.DOTS,)
    """Policies of the layers then."""

    profiled: tuple[Remat, ...] = (Remat.DOTS, Remat.FULL)
    """Policies under which its layers are timed; all but the first at one size."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """All of it."""

    size: Size
    """The model."""

    cards: tuple[Card, ...]
    """In JAX's order."""

    batch_size: int
    """Sequences of a step of all."""

    steps: int
    """That are measured, after two."""

    base: str
    """TOML of the kind that the cards are made of, called ``base``."""

    even: tuple[int, ...]
    """Microbatch of each card where all have equal batches."""

    layered: tuple[int, ...]
    """The same under layered accumulation."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Their names in the cluster."""
        return tuple(f"box/{i}" for i in range(len(self.cards)))

    @property
    def first_of_kind(self) -> Mapping[str, int]:
        """A card of each kind."""
        found: dict[str, int] = {}
        for i, card in enumerate(self.cards):
            found.setdefault(card.kind, i)
        return found

    def cluster(
        self,
        rows: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        link: Mapping[str, float] | None = None,
        host_gb_per_s: float = 46,
    ) -> Cluster:
        """The cluster, with measured rows of its kinds and its link where given."""
        link = link or {"latency_us": 10, "bandwidth_gb_per_s": 245}
        kinds = {card.kind: card for card in self.cards}
        lines = [
            *("format = 1", 'name = "emulated"', self.base),
            *(
                f'[kinds.{kind}]\nbase = "base"\nspeed = {card.speed}\n'
                f"memory_gib = {card.memory_gib}\n"
                f"host_link_gb_per_s = {host_gb_per_s}\n"
                'source = "an equal card, slowed and capped"'
                for kind, card in kinds.items()
            ),
            '[[nodes]]\nname = "box"\nhost_memory_gib = 512\nhost_cores = 64',
            f"link = {{ latency_us = {link['latency_us']}, "
            f"bandwidth_gb_per_s = {link['bandwidth_gb_per_s']} }}",
            "devices = [",
            *(f'  {{ kind = "{card.kind}", count = 1 }},' for card in self.cards),
            "]",
        ]
        made = Cluster.from_toml("\n".join(lines))
        if not rows:
            return made
        profiles = tuple(
            dataclasses.replace(
                profile,
                layer_times=tuple(rows.get(profile.kind, ())),
                source="an equal card, slowed and capped; layers measured",
            )
            for profile in made.profiles
        )
        return dataclasses.replace(made, profiles=profiles)


def _card(
    number: int,
    kind: str,
    multiprocessors: int,
    speed: float,
    memory_gib: float,
    a_step: int,
    sizes: tuple[int, ...],
    *remats: Remat,
) -> Card:
    hold = Hold(card=number, multiprocessors=multiprocessors, keep_gib=memory_gib)
    return Card(
        kind=kind,
        hold=hold,
        speed=speed,
        memory_gib=memory_gib,
        a_step=a_step,
        sizes=sizes,
        remats=remats or (Remat.DOTS,),
    )


LARGE = Setting(
    size=dataclasses.replace(MODEL, kind="whole", steps=6),
    cards=(
        _card(0, "whole", 0, 1.0, 80, 64, (8, 7)),
        _card(1, "half", 66, 0.54, 40, 32, (7, 4)),
        _card(2, "quarter", 99, 0.28, 24, 16, (2, 4)),
        _card(3, "whole", 0, 1.0, 80, 64, (8,), Remat.DOTS, Remat.NONE),
    ),
    batch_size=256,
    steps=6,
    base='[kinds.base]\nbase = "h200-141g-sxm"',
    even=(8, 4, 2, 8),
    layered=(8, 4, 2, 8),
)

PAIR = dataclasses.replace(
    LARGE, cards=LARGE.cards[:2], batch_size=128, even=(8, 4), layered=(8, 4)
)

MIXES = {
    "1-0.54": ("whole", "half"),
    "1-1-0.54-0.28": ("whole", "whole", "half", "quarter"),
    "1-0.54-0.54-0.28": ("whole", "half", "half", "quarter"),
    "1-1-1-0.28": ("whole", "whole", "whole", "quarter"),
}
"""Kinds of the cards, by their speeds."""

LARGER = dataclasses.replace(
    MODEL,
    kind="whole",
    steps=6,
    config=dataclasses.replace(
        MODEL.config,
        width=4096,
        depth=12,
        num_heads=32,
        num_kv_heads=32,
        ff_width=11_008,
    ),
)
"""Llama of 2.7 B."""


def _mixed(kinds: Sequence[str], *, larger: bool) -> Setting:
    """Cards of these kinds; of the larger model half the batch, in half the
    microbatches."""
    by_kind = {card.kind: card for card in LARGE.cards[:3]}
    halved = 2 if larger else 1
    cards = tuple(
        dataclasses.replace(
            by_kind[kind],
            hold=dataclasses.replace(by_kind[kind].hold, card=number),
            a_step=by_kind[kind].a_step // halved,
            sizes=tuple(dict.fromkeys(-(-n // halved) for n in by_kind[kind].sizes)),
        )
        for number, kind in enumerate(kinds)
    )
    each = {"whole": 8, "half": 4, "quarter": 2}
    even = tuple(each[kind] // halved for kind in kinds)
    return dataclasses.replace(
        LARGE,
        size=LARGER if larger else LARGE.size,
        cards=cards,
        batch_size=64 // halved * len(kinds),
        even=even,
        layered=even,
    )


SMALL = Setting(
    size=dataclasses.replace(SMALL_MODEL, kind="whole", steps=2),
    cards=(
        _card(0, "whole", 0, 1.0, 2, 8, (4, 2)),
        _card(1, "half", 66, 0.54, 1, 4, (2,)),
        _card(2, "quarter", 99, 0.28, 0.6, 4, (2,)),
        _card(3, "whole", 0, 1.0, 2, 8, (4,)),
    ),
    batch_size=32,
    steps=3,
    base="""[kinds.base]
vendor = "cpu"
memory_gib = 2
peak_tflops = { float32 = 0.05 }
memory_gb_per_s = 10
host_link_gb_per_s = 10""",
    even=(4, 2, 2, 4),
    layered=(4, 2, 2, 4),
)


SETTINGS = {
    "four": LARGE,
    "pair": PAIR,
    "small": SMALL,
    **{name: _mixed(kinds, larger=False) for name, kinds in MIXES.items()},
    **{f"{name}-2.7B": _mixed(kinds, larger=True) for name, kinds in MIXES.items()},
}
"""By name; ``small`` is forced CPU devices, ``1-0.54`` is ``pair``; 1.35 B, where the
name does not say 2.7."""
