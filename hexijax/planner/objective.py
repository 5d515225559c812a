"""What a plan is chosen by: the seconds, the dollars or the joules of a step.

    step_s, seconds that each device computes -> Goal.cost -> the less, the better

Money and energy count the devices that a plan uses; one left out costs nothing. A
device in use costs its price all step, and draws its board's power while it computes
and less while it waits.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import assert_never

from hexijax.cluster import Cluster, DeviceProfile
from hexijax.plan.plan import PlanError

HOUR_S = 3600

TIE = 1e-12
"""A second's weight beside dollars or joules: of equal plans the faster one counts,
and where all that is used is free, the fastest."""

IDLE_SHARE = 0.2
"""Of board power that a device draws while it waits, where ``idle_w`` is not given.

An assumption: a card that holds a context stays at clocks that draw 26 to 66 W more
than it does unused (H100, A100 and L40S, arXiv 2605.23918), which together is a sixth
to a quarter of its board's power.
"""


class Objective(enum.StrEnum):
    """What a search makes as small as it can; the values stand in plans."""

    STEP = "step_time"
    """Seconds of a step."""
    PRICE = "price"
    """Dollars of a token."""
    ENERGY = "energy"
    """Joules of a token."""


class Goal:
    """An objective on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        objective: Objective = Objective.STEP,
        usd_per_hour: Mapping[str, float] | None = None,
    ) -> None:
        """Refuses an objective that some kind has no figures for.

        Args:
          cluster: whose devices plans use.
          objective: what counts.
          usd_per_hour: of a kind's device, over the price of its profile.

        Raises:
          PlanError: a kind without a price, or without board power.
        """
        self.objective = objective
        self._kind_of = {device.name: device.kind for device in cluster.devices}
        self._profiles = {profile.kind: profile for profile in cluster.profiles}
        self._usd_per_hour = {
            kind: profile.price_usd_per_hour
            for kind, profile in self._profiles.items()
            if profile.price_usd_per_hour is not None
        } | {**(usd_per_hour or {})}
        match objective:
            case Objective.STEP:
                pass
            case Objective.PRICE:
                self._refuse(self._usd_per_hour, _NO_PRICE)
            case Objective.ENERGY:
                powered = [k for k, p in self._profiles.items() if p.tdp_w is not None]
                self._refuse(powered, _NO_POWER)
            case _:
                assert_never(objective)

    def cost(self, step_s: float, busy_s: Mapping[str, float]) -> float:
        """What a step costs under the objective.

        Args:
          step_s: its seconds.
          busy_s: seconds that each device in use computes; unread for a step's time.
        """
        if self.objective is Objective.STEP:
            return step_s
        return self._own(step_s, busy_s) + TIE * step_s

    def _own(self, step_s: float, busy_s: Mapping[str, float]) -> float:
        match self.objective:
            case Objective.STEP:
                own = step_s
            case Objective.PRICE:
                own = self.usd(step_s, busy_s)
            case Objective.ENERGY:
                own = self.joules(step_s, busy_s)
            case _:
                assert_never(self.objective)
        assert own is not None, "kinds without figures were refused"
        return own

    def usd(self, step_s: float, devices: Mapping[str, float]) -> float | None:
        """Dollars of a step on these devices; None: of a kind no price is known."""
        kinds = [self._kind_of[name] for name in devices]
        if any(kind not in self._usd_per_hour for kind in kinds):
            return None
        return step_s * sum(self._usd_per_hour[kind] for kind in kinds) / HOUR_S

    def joules(self, step_s: float, busy_s: Mapping[str, float]) -> float | None:
        """Joules of a step; None: of a kind no board power is known."""
        total = 0.0
        for name, busy in busy_s.items():
            profile = self._profiles[self._kind_of[name]]
            if profile.tdp_w is None:
                return None
            total += profile.tdp_w * busy + idle_w(profile) * max(0.0, step_s - busy)
        return total

    def least_of(self, kind: str) -> float:
        """What a second of a device costs at least, while it computes."""
        name = next(n for n, k in self._kind_of.items() if k == kind)
        return self._own(1.0, {name: 1.0})

    def _refuse(self, known: Sequence[str] | Mapping[str, float], says: str) -> None:
        unknown = [kind for kind in self._profiles if kind not in known]
        if unknown:
            raise PlanError(says.format(kinds=", ".join(unknown), first=unknown[0]))


def idle_w(profile: DeviceProfile) -> float:
    """Power of a device in use that waits; its board power is known."""
    assert profile.tdp_w is not None, profile.kind
    return IDLE_SHARE * profile.tdp_w if profile.idle_w is None else profile.idle_w


_NO_PRICE = (
    "A plan by price was asked for, and nothing says what an hour of these kinds "
    "costs: {kinds}. Give --price FILE, which has a table [usd_per_hour] and in it a "
    "line `{first} = 1.0`, or the cluster file a line `price_usd_per_hour = 1.0` in "
    "its table [kinds.{first}]; a card of your own may cost 0."
)
_NO_POWER = (
    "A plan by energy was asked for, and nothing says what the boards of these kinds "
    "draw: {kinds}. Give the cluster file a line `tdp_w = 300`, in watts, in its table "
    "[kinds.{first}]."
)
