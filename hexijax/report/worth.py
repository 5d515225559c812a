"""What machines bring: rates, money and time of a plan, and what each card adds.

Judged, prices -> Offer; Judged of every smaller cluster -> Worth
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hexijax.cluster import Cluster, Device
from hexijax.planner import Objective
from hexijax.report.explain import Table
from hexijax.report.judged import Judged
from hexijax.report.objectives import cell, heading, rate_heading
from hexijax.report.words import rate, seconds

DAY_S = 86_400
FEW_NODES = 8
"""Up to here cards are told apart by node; beyond it by kind only."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A cluster with its best plan and its price."""

    name: str
    """``now`` or ``then``."""

    judged: Judged
    """Its plan."""

    usd_per_hour: float | None
    """Of all its devices, used or not, but where plans are chosen by price: there of
    those in use. None: some kind's price is unknown."""

    @property
    def tokens_per_usd(self) -> float | None:
        """Tokens trained on for a dollar."""
        if not self.usd_per_hour:
            return None
        return self.judged.tokens_per_s * 3600 / self.usd_per_hour

    def days(self, tokens: float) -> float:
        """Days that so many tokens take."""
        return tokens / self.judged.tokens_per_s / DAY_S

    def figures(self, tokens: float | None) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            **self.judged.figures(),
            "name": self.name,
            "usd_per_hour": self.usd_per_hour,
            "tokens_per_usd": self.tokens_per_usd,
            "days": self.days(tokens) if tokens else None,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """What one card of a class adds: planning without it."""

    cards: tuple[Device, ...]
    """Equal cards; the last one was left out."""

    share: float
    """Part of the tokens a second, a dollar or a joule that is lost without one."""

    tokens_per_cost: float
    """The same in tokens."""

    @classmethod
    def of(cls, cards: tuple[Device, ...], whole: float, less: float) -> "Worth":
        """From tokens with all cards, and with one fewer."""
        return cls(
            cards=cards, share=1 - less / whole, tokens_per_cost=max(0.0, whole - less)
        )

    @property
    def title(self) -> str:
        """``rtx3090-24g in box``."""
        nodes = {card.node for card in self.cards}
        where = nodes.pop() if len(nodes) == 1 else f"{len(nodes)} nodes"
        return f"{self.cards[0].kind} in {where}"

    def figures(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "kind": self.cards[0].kind,
            "cards": [card.name for card in self.cards],
            "share": self.share,
            "tokens_per_cost": self.tokens_per_cost,
        }


def classes(cluster: Cluster) -> Iterator[tuple[Device, ...]]:
    """Equal cards: of one kind and memory, in one node where there are few."""
    found: dict[object, list[Device]] = {}
    few = len(cluster.nodes) <= FEW_NODES
    for device in cluster.devices:
        key = (device.kind, device.usable_memory_bytes, device.node if few else "")
        found.setdefault(key, []).append(device)
    yield from (tuple(cards) for cards in found.values())


def offers(rows: Sequence[Offer], tokens: float | None) -> Table:
    """A row a cluster."""
    days = [f"days to {rate(tokens)}"] if tokens else []
    own = heading(rows[0].judged.problem.objective)
    table: Table = [
        ("", "devices", "used", "step", "tokens/s", "MFU", "USD/h", "tokens/USD",
         *own, *days, "ratio")
    ]  # fmt: skip
    first = rows[0].judged.tokens_per_cost
    for row in rows:
        judged, money = row.judged, row.tokens_per_usd
        table.append(
            (
                row.name,
                f"{len(judged.problem.cluster.devices)}",
                f"{len(judged.used)}",
                seconds(judged.step_s),
                rate(judged.tokens_per_s),
                "-" if judged.mfu is None else f"{judged.mfu:.1%}",
                "-" if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}",
                "-" if money is None else rate(money),
                *cell(judged),
                *([f"{row.days(tokens):.3g}"] if tokens else []),
                f"{judged.tokens_per_cost / first:.2f}x",
            )
        )
    return table


def worths(rows: Sequence[Worth], objective: Objective) -> Table:
    """A row a class of cards, the most worth first."""
    table: Table = [("without one", "of", "loses", rate_heading(objective))]
    for row in sorted(rows, key=lambda worth: -worth.share):
        table.append(
            (
                row.title,
                f"{len(row.cards)}",
                f"{row.share:.1%}",
                rate(row.tokens_per_cost),
            )
        )
    return table
