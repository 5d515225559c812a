"""Sums over queues that bound a step, for all counts at once.

Profile, Allowed -> Bounds -> ranked, starts, near -> Choices ; lowest_s
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hexijax.planner.offload.choice import (
    GRAD_BYTES,
    WEIGHT_SLOTS,
    Choice,
    Kept,
    LayerChoice,
    Profile,
    State,
    Weights,
)
from hexijax.planner.offload.near import Allowed, counted, near
from hexijax.planner.offload.room import Room
from hexijax.planner.offload.score import CLOSE


@dataclasses.dataclass(frozen=True, slots=True)
class _Mix:
    """One way for the layers to keep residuals."""

    kept: tuple[Kept, ...]
    passes_s: np.ndarray
    """Of each layer, forward and backward of one microbatch."""
    until_s: np.ndarray
    """Compute of a step between a layer's first forward and its last backward, both
    left out."""
    left_bytes: float
    """To the host and back, of one microbatch."""
    left_s: tuple[float, float]
    """Seconds of that back, and there."""
    backward_s: np.ndarray
    """Of each layer, the backward alone."""
    rooms_bytes: np.ndarray
    """Peak of the device beyond parameters and state with one, two, ... gradients of
    the largest alive."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Stream:
    """Layers whose parameters are streamed."""

    on: tuple[bool, ...]
    fetched_s: np.ndarray
    """Of each layer, in a step."""
    returned_s: np.ndarray
    """The same where the host's updates made them."""
    stored_s: np.ndarray
    """Of each layer, new parameters that go to the host."""
    device_bytes: int
    """Parameters on the device."""
    host_bytes: float
    """On the host."""


class Bounds:
    """Sums over queues for all counts, and what of device memory they take."""

    def __init__(self, profile: Profile, allowed: Allowed, most: int) -> None:
        self._profile, self._allowed, self._most = profile, allowed, most
        layers = profile.layers
        self._depth = len(layers)
        self._state = np.array([x.state_bytes * x.trains for x in layers], float)
        # Where a chunk is so large that its slots take more than all of the state,
        # the state stays.
        large = [profile.chunks * x.chunk_bytes > x.state_bytes for x in layers]
        typical = sorted(x.chunk_bytes for x in layers)[len(layers) // 2]
        self._stays = np.array(
            [
                State.DEVICE in allowed.state and y and x.chunk_bytes > typical
                for x, y in zip(layers, large, strict=True)
            ]
        )
        each_s = [profile.state_s(j) for j in range(self._depth)]
        comes_s, leaves_s = np.array(each_s).T * [x.trains for x in layers]
        self._passing = self._state * ~self._stays
        self._comes_s, self._leaves_s = comes_s * ~self._stays, leaves_s * ~self._stays
        self._each_s = comes_s.max(), leaves_s.max()
        self._homed = np.array([x.homed_params * x.trains for x in layers], float)
        self._weights = np.array([x.weights_bytes for x in layers], float)
        self._share = np.array(
            [x.homed_params / x.num_params if x.trains else 0.0 for x in layers]
        )
        self._update_s = np.array([x.resident_update_s for x in layers])
        self._fetch_s = np.array(
            [profile.in_s(x.weights_bytes, x.weights_pieces) for x in layers]
        )
        self._return_s = self._weights / profile.host.return_bytes_per_s
        self._store_s = np.array(
            [
                profile.out_s(x.weights_bytes * share, x.weights_pieces) * x.trains
                for x, share in zip(layers, self._share, strict=True)
            ]
        )
        self._grads_s = np.array(
            [profile.grads_s(j) * x.trains for j, x in enumerate(layers)]
        )
        grads = [x.grads_bytes if x.trains else 0 for x in layers]
        tied = sum(g for g, x in zip(grads, layers, strict=True) if x.last_user)
        self._limits = [tied + n * max(grads) for n in range(1, self._depth + 1)]
        if profile.grads_stay or profile.microbatches > 1:
            self._limits = [sum(grads)] * self._depth
        self._splits = allowed.splits(self._depth)
        self._s = np.array([split[0] for split in self._splits], int)
        self._u = np.array([split[1] for split in self._splits], int)

    def _mixes(self) -> Iterator[_Mix]:
        """One way of keeping residuals, then another."""
        ways = self._allowed.ways
        for kept in ways:
            yield self._mix((kept,) * self._depth)
        for first, second in itertools.combinations(ways, 2):
            for k in range(1, self._depth):
                yield self._mix((first,) * k + (second,) * (self._depth - k))

    def _mix(self, kept: tuple[Kept, ...]) -> _Mix:
        layers, m = self._profile.layers, self._profile.microbatches
        pairs = [*zip(layers, kept, strict=True)]
        passes = np.array(
            [x.forward_s[k.remat] + x.backward_s[k.remat] for x, k in pairs]
        )
        # A layer's own pass and those of later layers stand between the two.
        later = np.append(np.cumsum(passes[::-1])[::-1], 0.0)[1:]
        resting = tuple(LayerChoice(weights=Weights.KEPT, kept=k) for k in kept)
        room = Room(self._profile, resting)
        away = [(x, k) for x, k in pairs if k is Kept.HOST]
        left = sum(x.kept_bytes[k.remat] for x, k in away)
        moved = left, sum(x.kept_pieces for x, _ in away)
        return _Mix(
            kept=kept,
            passes_s=passes,
            until_s=later + (m - 1) * passes.sum(),
            left_bytes=left,
            left_s=(self._profile.in_s(*moved), self._profile.out_s(*moved)),
            backward_s=np.array([x.backward_s[k.remat] for x, k in pairs]),
            rooms_bytes=np.array([room.peak_bytes(x) for x in self._limits])
            - self._state.sum()
            - self._weights.sum(),
        )

    def _streams(self) -> Iterator[_Stream]:
        """All that may be."""
        return map(self._stream, self._allowed.streams(self._depth))

    def _stream(self, on: tuple[bool, ...]) -> _Stream:
        m, where = self._profile.microbatches, np.array(on)
        # Twice a microbatch; those that lie in the slots at its turn once less.
        fetches = 2 * m * where.astype(float)
        for i in np.nonzero(where)[0][-WEIGHT_SLOTS:]:
            fetches[i] -= m
        for i in np.nonzero(where)[0][:WEIGHT_SLOTS]:
            fetches[i] = max(1, fetches[i] - (m - 1))
        passing = (self._weights * where).max() if where.any() else 0
        return _Stream(
            on=on,
            fetched_s=self._fetch_s * fetches,
            returned_s=self._return_s * fetches,
            stored_s=self._store_s * where,
            device_bytes=int((self._weights * ~where).sum() + WEIGHT_SLOTS * passing),
            host_bytes=(self._weights * where).sum(),
        )

    def ranked(self) -> Iterator[tuple[float, Choice]]:
        """Choices that may fit with their bounds, the least first; of equal bounds
        that with the least work of all queues together."""
        mixes, streams, every = self._every
        order = np.lexsort((every[:, 1], _coarse(every[:, 0])))
        for bound, _, a, b, c in every[order]:
            yield (
                float(bound),
                self._choice(
                    mixes[int(a)].kept, streams[int(b)].on, self._splits[int(c)]
                ),
            )

    @functools.cached_property
    def _every(self) -> tuple[list[_Mix], list[_Stream], np.ndarray]:
        """Of the counts with the least bounds of each mix that may fit: bound, work,
        and which mix, stream and split."""
        mixes, streams = [*self._mixes()], [*self._streams()]
        states, sums = self._states(), _Sums.of(self._profile, streams, self._share)
        rows: list[np.ndarray] = [np.zeros((0, 5))]
        for a, mix in enumerate(mixes):
            bound, total, b, c = self._bound(mix, sums, states, self._windows_s(mix))
            coarse = _coarse(bound)
            if len(coarse) > self._most:
                least = np.partition(coarse, self._most)[self._most]
                few = np.nonzero(coarse <= least)[0]
                first = few[np.lexsort((total[few], coarse[few]))][: self._most]
            else:
                first = np.arange(len(coarse))
            rows.append(
                np.stack([bound, total, np.full(len(b), a), b, c], axis=1)[first]
            )
        return mixes, streams, np.concatenate(rows)

    def lowest_s(self) -> float:
        """The least bound of all."""
        return float(self._every[2][:, 0].min(initial=math.inf))

    @property
    def number(self) -> int:
        """Of all counts."""
        mixes, streams, _ = self._every
        return len(mixes) * len(streams) * len(self._splits)

    def starts(self) -> Iterator[Choice]:
        """Each way of keeping residuals for all layers, with as much state on the
        device as leaves room for all gradients to wait, for a few, or for one."""
        depth = self._depth
        ways = self._allowed.ways
        counts = {0, depth // 2, depth}
        streams = [x for x in self._streams() if sum(x.on) in counts]
        hosted = {depth, depth - 1, depth - depth // 4, 0}
        for kept, stream, u in itertools.product(ways, streams, hosted):
            firsts = sorted((s for s, stop in self._splits if stop == u), reverse=True)
            for waiting in dict.fromkeys((depth, 4, 1)):
                limit = self._limits[min(waiting, depth) - 1]
                choices = [
                    functools.partial(self._choice, (kept,) * depth, stream.on, (s, u))
                    for s in firsts
                ]
                first = self._first_fitting(choices, limit)
                if first:
                    yield first

    def _first_fitting(
        self, choices: Sequence[Callable[[], Choice]], limit: float
    ) -> Choice | None:
        """Of choices with less and less on the device; the first has no chunks there,
        so that the second may need more."""
        room = self._profile.device_bytes

        def fits(at: int) -> bool:
            return Room(self._profile, choices[at]()).peak_bytes(limit) <= room

        if choices and fits(0):
            return choices[0]()
        low, high = 1, len(choices)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return choices[low]() if 0 < low < len(choices) else None

    def near(self, choice: Choice) -> Iterator[Choice]:
        """Choices one count away that may be used."""
        return near(choice, self._allowed, stays=self._stays.tolist())

    def _choice(
        self, kept: Sequence[Kept], streamed: Sequence[bool], split: tuple[int, int]
    ) -> Choice:
        return counted(kept, streamed, split, self._stays.tolist())

    def _states(self) -> dict[str, np.ndarray]:
        """Over state splits, what depends on nothing else."""
        s, u, depth = self._s, self._u, self._depth
        streamed = self._choice((Kept.FULL,) * depth, (False,) * depth, (0, depth))
        chunks = Room(self._profile, streamed).chunks_bytes
        return {
            "comes": _between(self._comes_s, s, u),
            "leaves": _between(self._leaves_s, s, u),
            "grads": _between(self._grads_s, u, depth),
            "updated": _between(self._homed, u, depth),
            "device": _between(self._state, 0, s)
            + _between(self._state * self._stays, s, u)
            + np.where(u > s, chunks, 0),
            "host": _between(self._passing, s, u)
            + _between(self._state, u, depth)
            + _between(self._homed * GRAD_BYTES, u, depth),
        }

    def _windows_s(self, mix: _Mix) -> np.ndarray:
        """Over state splits: a layer's state passes between its last backward and its
        next forward, and so does that of all layers before it."""
        ends = np.arange(1, self._depth + 1)[None, :]
        stop = np.minimum(ends, self._u[:, None])
        start = np.minimum(self._s[:, None], stop)
        passing_s = _between(self._comes_s, start, stop)
        there = (ends - 1 >= self._s[:, None]) & (ends <= self._u[:, None])
        return np.where(there, mix.until_s + passing_s, 0.0).max(axis=1)

    def _bound(
        self,
        mix: _Mix,
        sums: "_Sums",
        states: dict[str, np.ndarray],
        windows_s: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of what may fit: seconds that no order beats, the sum of all queues' work,
        and which streams and state splits they are."""
        profile, host, depth = self._profile, self._profile.host, self._depth
        m = profile.microbatches
        on_device = sums.device_bytes[:, None] + states["device"]
        waits = np.searchsorted(
            mix.rooms_bytes, profile.device_bytes - on_device, side="right"
        )
        on_host = mix.left_bytes + sums.host_bytes[:, None] + states["host"]
        b, c = np.nonzero((waits > 0) & (on_host <= host.memory_bytes))
        s, u, waiting = self._s[c], self._u[c], waits[b, c]
        # Those updates run on the host.
        updates_s = self._update_s.sum() - _between(self._update_s, u, depth)
        compute = m * mix.passes_s.sum() + updates_s
        back_s, left_s = mix.left_s
        inward = (
            m * back_s
            + sums.fetched_s[b, u]
            + sums.returned_s[b, depth]
            - sums.returned_s[b, u]
            + states["comes"][c]
        )
        outward = (
            m * left_s + states["leaves"][c] + sums.stored_s[b, u] + states["grads"][c]
        )
        updated = states["updated"][c] / host.update_params_per_s
        # From a layer's first forward to its last backward, and its update's way.
        at = np.minimum(u, depth - 1)
        each_s = self._grads_s + self._homed / host.update_params_per_s
        chain = np.where(u < depth, mix.until_s[at] + mix.passes_s[at] + each_s[at], 0)
        # So many gradients may wait when the backwards have passed the first streamed
        # layer; the other layers' state has come and gone by then.
        hurried_s = np.maximum(
            states["comes"][c] - self._each_s[0] * waiting,
            states["leaves"][c] - self._each_s[1] * (waiting + 1),
        )
        backward_s = _between(mix.backward_s, s, depth)
        hurry = m * mix.passes_s.sum() - backward_s + np.maximum(backward_s, hurried_s)
        bound = np.maximum.reduce(
            [compute, inward, outward, updated, chain, windows_s[c], hurry]
        )
        return bound, compute + inward + outward + updated, b, c


@dataclasses.dataclass(frozen=True, slots=True)
class _Sums:
    """Of all streams: bytes, and sums of bytes over their first layers."""

    device_bytes: np.ndarray
    host_bytes: np.ndarray
    fetched_s: np.ndarray
    stored_s: np.ndarray
    returned_s: np.ndarray
    """New parameters that the host made: fetched, or of layers that keep them on the
    device."""

    @classmethod
    def of(
        cls, profile: Profile, streams: Sequence[_Stream], share: np.ndarray
    ) -> "_Sums":
        weights = np.array([x.weights_bytes for x in profile.layers], float)
        kept_s = weights * share / profile.host.return_bytes_per_s
        return cls(
            device_bytes=np.array([x.device_bytes for x in streams], float),
            host_bytes=np.array([x.host_bytes for x in streams], float),
            fetched_s=_first_sums([x.fetched_s for x in streams]),
            stored_s=_first_sums([x.stored_s for x in streams]),
            returned_s=_first_sums(
                [x.returned_s + kept_s * ~np.array(x.on) for x in streams]
            ),
        )


def _first_sums(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Of each row, the sums of its first 0, 1, ... entries."""
    return np.concatenate(
        [np.zeros((len(rows), 1)), np.cumsum(np.array(rows), axis=1)], axis=1
    )


def _coarse(bounds_s: np.ndarray) -> np.ndarray:
    """Bounds that differ by less than anyone asks for count as equal."""
    return np.ceil(np.log(bounds_s) / CLOSE)


def _between(
    values: np.ndarray, start: np.ndarray | int, stop: np.ndarray | int
) -> np.ndarray:
    """Sums of runs."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[stop] - sums[start]
