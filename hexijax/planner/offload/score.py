"""Seconds of a step under one choice: a bound by sums, and the best order drawn.

Profile, Choice, Rules -> bound_s, scored -> Scored
"""

import dataclasses
import math

from hexijax.planner.offload.budget import Budget
from hexijax.planner.offload.choice import Choice, Profile
from hexijax.planner.offload.order import Order, Rule, draw, play
from hexijax.planner.offload.room import Room
from hexijax.planner.offload.tasks import Queue, Work, step_tasks

PACES = (1.0, 0.8, 1.3, 0.6, 1.7, 0.4, 2.5)
"""Nominal seconds of the busiest copies for each second of compute: orders are drawn at
these and played at true rates. They are the same for every link, so that a faster one
has no fewer orders to choose from."""

LIMITS = (math.inf, 16, 8, 4, 2, 1)
"""Most gradients alive at once, as multiples of the largest; the orders that fit."""

LIKELY, QUICK = 0.85, 2
"""The pace that as a rule is best, as a share of the true one, and how many about it
are tried where that has to do."""

FAR = 1.15
"""A first order so much slower than asked is not followed by a second."""

CLOSE = 1e-3
"""An order this close to the bound is not looked for any further."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a schedule may do."""

    rule: Rule = Rule.PRIORITY
    """What goes first."""

    barrier: bool = False
    """A step begins when all of the one before has ended."""

    on_demand: bool = False
    """Streamed parameters are asked for when their pass would begin."""

    paces: tuple[float, ...] = PACES
    """At which orders are drawn."""

    limits: tuple[float, ...] = LIMITS
    """Tried where they fit, the largest first."""

    def work(self, profile: Profile, choice: Choice) -> Work:
        """The tasks of a step under them."""
        return step_tasks(
            profile, choice, barrier=self.barrier, on_demand=self.on_demand
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A choice with its best order."""

    choice: Choice
    order: Order
    step_s: float
    """Of a step in the steady state."""
    bound_s: float
    """What no order of this choice can beat."""
    device_bytes: int
    """At most on the device."""
    host_bytes: int
    """Of host memory, this device's."""
    limit_bytes: float
    """Of gradients alive at once, at most."""
    moved_s: float
    """Seconds of copies and of updates on the host, were they one after another."""


def loads_s(work: Work) -> list[float]:
    """Seconds of a step's tasks on each queue."""
    loads = [0.0] * len(Queue)
    for task in work.tasks:
        loads[task.queue] += task.seconds
    return loads


def bound_s(work: Work) -> float:
    """No order is faster: each queue does all its tasks, and what an update makes is
    needed by the next step's forward of the layer it follows the backward of."""
    passes = [i for i, task in enumerate(work.tasks) if task.compute >= 0]
    longest = max(loads_s(work))
    firsts = [i for i in passes if any(lag for _, lag in work.tasks[i].after)]
    done: dict[int, float] = {}
    for first in firsts:
        done.clear()
        for i in range(first, len(work.tasks)):
            task = work.tasks[i]
            begun = [done[b] for b, lag in task.after if not lag and b in done]
            if i == first or begun:
                done[i] = max(begun, default=0.0) + task.seconds
        for before, lag in work.tasks[first].after:
            if lag and before in done:
                longest = max(longest, done[before])
    return longest


def scored(
    profile: Profile,
    choice: Choice,
    rules: Rules,
    *,
    quick: bool = False,
    below_s: float = math.inf,
    budget: Budget | None = None,
) -> Scored | None:
    """The best order found; None: it does not fit, or is no faster than asked.

    ``quick``: of few orders, those that are likely the best. ``budget``: is told what
    is drawn.
    """
    room = Room(profile, choice)
    if room.host_bytes > profile.host.memory_bytes:
        return None
    least = room.least_limit_bytes
    if room.peak_bytes(least) > profile.device_bytes:
        return None
    work = rules.work(profile, choice)
    bound = bound_s(work)
    if bound >= below_s * (1 - CLOSE):
        return None
    grads = [x.grads_bytes if x.trains else 0 for x in profile.layers]
    loads = loads_s(work)
    likely = LIKELY * max(loads[1:]) / loads[Queue.COMPUTE]
    paces = sorted(rules.paces, key=lambda pace: abs(math.log(pace / max(likely, 0.1))))
    best: Scored | None = None
    seen: set[float] = set()
    for share in rules.limits:
        limit = max(least, share * max(grads, default=0))
        peak = room.peak_bytes(limit)
        if limit in seen or peak > profile.device_bytes:
            continue
        if seen and quick:
            break
        seen.add(limit)
        for pace in paces[:QUICK] if quick else paces:
            paced = _paced(profile, choice, pace)
            nominal = rules.work(paced, choice)
            order = draw(nominal, rules.rule, grads, limit)
            if budget:
                budget.drawn += len(work.tasks)
            if order is None:
                continue
            step_s = play(work, order)
            if best is None or step_s < best.step_s:
                best = Scored(
                    choice=choice,
                    order=order,
                    step_s=step_s,
                    bound_s=bound,
                    device_bytes=peak,
                    host_bytes=room.host_bytes,
                    limit_bytes=limit,
                    moved_s=sum(loads[1:]),
                )
            if best.step_s <= bound * (1 + CLOSE):
                return best
            if quick and best.step_s > FAR * below_s:
                return best
    return best


def _paced(profile: Profile, choice: Choice, pace: float) -> Profile:
    """The profile with links and host as fast as makes the busiest copies take
    ``pace`` of compute, and the host's updates as long."""
    plain = step_tasks(_at_rates(profile, 1.0, 1.0), choice)
    loads = loads_s(plain)
    wanted_s = pace * loads[Queue.COMPUTE]
    moved = max(loads[Queue.IN], loads[Queue.OUT])
    return _at_rates(
        profile, max(1.0, moved) / wanted_s, max(1.0, loads[Queue.HOST]) / wanted_s
    )


def _at_rates(profile: Profile, bytes_per_s: float, params_per_s: float) -> Profile:
    host = dataclasses.replace(
        profile.host,
        in_bytes_per_s=bytes_per_s,
        out_bytes_per_s=bytes_per_s,
        return_bytes_per_s=bytes_per_s,
        update_params_per_s=params_per_s,
    )
    return dataclasses.replace(profile, host=host, piece_s=0.0)
