"""How long a state takes to be put together again, after one or two of four nodes.

Run:     python -m experiments.recovery_table > docs/recovery.md
Needs:   four forced CPU devices, 6 GB of memory, five minutes, two cores with nothing
         else to do: it waits for moments at which they have not, or, where there are
         none, divides all rates (--slower 5)
Expect:  each cell at 0.87 or more of what byte counts and rates allow

Survivors hold a part of the state, each the same; the far tier holds all of it. A
survivor gives 0.25 GB/s, as a network of 2 Gbit/s does; the far tier is a
server in a process of its own, read over loopback at the rate of the column. Both are
read by the code of a recovery: assigned, read by four threads a source, cut anew, and
assembled on the devices of those that are left.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.recovery_sources import COLUMNS, ROWS, Loopback, Paced, far_tier

if TYPE_CHECKING:
    import jax

    from hexijax.checkpoint.assemble import Moved
    from hexijax.checkpoint.slices import Key, Slice

HELD = (0.0, 0.25, 0.5, 0.9, 1.0)
"""Of the state, by survivors."""

FAR_BYTES_PER_S = (0.1e9, 0.5e9, 1e9, 2e9)
LOCAL_BYTES_PER_S = 0.25e9
"""Of each survivor."""

LOST = (1, 2)
NODES = 4

ARRAYS = 42
"""Of a state of 991 MB."""

READERS = 4
"""Threads a source, where the machine itself is measured; a recovery has as many."""

OTHERS_CORES, LOOK_S = 0.2, 0.1
"""What others may compute right before and after a recovery that counts, and how long
that is looked at."""

PATIENCE_S = 900.0
"""Of the whole table, after which each recovery counts as it is."""

KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_ARENA_MAX": "2",
}
"""Memory that is let go is not given back to the system: taking it anew costs more than
reading at 2 GB/s, and would be measured in place of the rates."""

LEAST = 0.87
"""Of what is allowed."""

WORTH = 4.38
"""AutoHet's recovery beside one from the cloud alone (arXiv 2512.20953)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One recovery beside one from the far tier alone."""

    lost: int
    held: float
    far_bytes_per_s: float
    """Asked for; all rates are slower alike where a table is."""
    ours_s: float
    far_s: float
    allowed: float
    """The ratio that byte counts and measured rates allow."""
    moved: "Mapping[str, int]"
    most_bytes_per_s: float
    """That this machine puts together, whatever sources give."""

    @property
    def ratio(self) -> float:
        """How much sooner."""
        return self.far_s / self.ours_s


class State:
    """Arrays of a state, and the devices that it is put on."""

    def __init__(self, arrays: int = ARRAYS):
        from hexijax.checkpoint.slices import Key

        rng = np.random.default_rng(0)
        self.arrays = {
            Key(f"w{i // 3}", ("master", "0/mu", "0/nu")[i % 3]): rng.random(
                (ROWS, COLUMNS), np.float32
            )
            for i in range(arrays)
        }
        self.num_bytes = sum(x.nbytes for x in self.arrays.values())

    def targets(
        self, nodes: int
    ) -> "tuple[dict[Slice, list[jax.ShapeDtypeStruct]], dict[jax.Device, str]]":
        """Its rows cut evenly over nodes, and the node of each device."""
        import jax

        from hexijax.checkpoint.slices import Slice

        found: dict[Slice, list[jax.ShapeDtypeStruct]] = {}
        devices = jax.devices()[:nodes]
        for key in self.arrays:
            for i, device in enumerate(devices):
                rows = (i * ROWS // nodes, (i + 1) * ROWS // nodes)
                like = jax.ShapeDtypeStruct(
                    (rows[1] - rows[0], COLUMNS),
                    np.float32,
                    sharding=jax.sharding.SingleDeviceSharding(device),
                )
                found[Slice(*key, (rows, (0, COLUMNS)))] = [like]
        return found, {device: f"n{i}" for i, device in enumerate(devices)}

    def survivors(
        self, nodes: int, held: float, rate_bytes_per_s: float = LOCAL_BYTES_PER_S
    ) -> list[Paced]:
        """Of so many nodes, each with as many of the rows that are held."""
        edges = [round(held * ROWS * i / nodes) for i in range(nodes + 1)]
        return [
            Paced(
                arrays=self.arrays,
                holds={key: [((a, b), (0, COLUMNS))] for key in self.arrays if a < b},
                node=f"n{i}",
                rate_bytes_per_s=rate_bytes_per_s,
            )
            for i, (a, b) in enumerate(itertools.pairwise(edges))
        ]


def others_cores() -> float:
    """Cores at work while this process waits."""

    def spent_s() -> float:
        (line, *_) = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        user, nice, system, _idle, _waits, *interrupts = map(int, line.split()[1:9])
        return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")

    before_s = spent_s()
    time.sleep(LOOK_S)
    return (spent_s() - before_s) / LOOK_S


def quiet(measure: Callable[[], float], until_s: float) -> float:
    """Seconds that something takes while nothing else goes on, if that can be had
    before a moment of the clock."""
    while True:
        while others_cores() > OTHERS_CORES and time.monotonic() < until_s:
            pass
        took_s = measure()
        if others_cores() <= OTHERS_CORES or time.monotonic() > until_s:
            return took_s


def recovery_s(
    state: State, nodes: int, sources: Sequence[Any], repeats: int, until_s: float
) -> "tuple[float, Moved]":
    """Seconds until the state is on its devices, the best of some, and checked."""
    from hexijax.checkpoint.assemble import assemble
    from hexijax.checkpoint.assign import soonest

    targets, node_of = state.targets(nodes)
    moves: list[Moved] = []

    def once() -> float:
        began_s = time.monotonic()
        found, moved = assemble(targets, sources, soonest(), node_of)
        took_s = time.monotonic() - began_s
        for each, (array,) in found.items():
            (start, stop), _ = each.box
            assert np.array_equal(array, state.arrays[each.key][start:stop]), each
        moves.append(moved)
        return took_s

    return min(quiet(once, until_s) for _ in range(repeats)), moves[-1]


def cells(
    state: State,
    far: Sequence[float] = FAR_BYTES_PER_S,
    repeats: int = 4,
    slower: float = 1.0,
    patience_s: float = PATIENCE_S,
) -> Iterator[Cell]:
    """All of them, each the best of some; the slowest rate is measured less often."""
    until_s = time.monotonic() + patience_s
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state"
        with file.open("wb") as out:
            for array in state.arrays.values():
                out.write(array.tobytes())
        survivor = LOCAL_BYTES_PER_S / slower
        local = {}
        for lost in LOST:
            sources = state.survivors(NODES - lost, 1.0, survivor)
            took_s, _ = recovery_s(state, NODES - lost, sources, repeats, until_s)
            local[lost] = state.num_bytes / took_s
        most = most_bytes_per_s(state, file, repeats, until_s)
        for rate in far:
            times = 1 if rate < 0.2e9 else repeats
            with (
                far_tier(file, rate / slower) as port,
                closing(Loopback(port, list(state.arrays), rate / slower)) as tier,
            ):
                for lost in LOST:
                    nodes = NODES - lost
                    far_s, _ = recovery_s(state, nodes, [tier], times, until_s)
                    for held in HELD:
                        sources = [*state.survivors(nodes, held, survivor), tier]
                        ours_s, moved = recovery_s(
                            state, nodes, sources, times, until_s
                        )
                        measured = state.num_bytes / far_s
                        least_s = state.num_bytes * max(
                            (1 - held) / measured,
                            1 / (measured + local[lost] * (held > 0)),
                            1 / most,
                        )
                        yield Cell(
                            lost=lost,
                            held=held,
                            far_bytes_per_s=rate,
                            ours_s=ours_s,
                            far_s=far_s,
                            allowed=max(1.0, far_s / least_s),
                            most_bytes_per_s=most,
                            moved=moved.num_bytes,
                        )


def most_bytes_per_s(state: State, file: Path, repeats: int, until_s: float) -> float:
    """What this machine moves if no source is paced: half from survivors, half over
    loopback, each piece to a device as it comes, by nothing of a recovery's."""
    import jax

    free, nodes = 1e12, NODES - 1
    devices, half = jax.devices()[:nodes], ROWS // nodes // 2
    with (
        far_tier(file, free) as port,
        closing(Loopback(port, list(state.arrays), free)) as tier,
    ):
        sources = [*state.survivors(nodes, 1.0, free), tier]

        def once() -> float:
            def put(source: Any, key: "Key", first: int, node: int) -> "jax.Array":
                rows = (first, first + half)
                found = source.read(*key, (rows, (0, COLUMNS)))
                return jax.device_put(found, devices[node], may_alias=False)

            pools = [concurrent.futures.ThreadPoolExecutor(READERS) for _ in sources]
            began_s = time.monotonic()
            puts = [
                pools[at].submit(put, sources[at], key, (2 * node + after) * half, node)
                for key in state.arrays
                for node in range(nodes)
                for after, at in enumerate((node, nodes))
            ]
            jax.block_until_ready([each.result() for each in puts])
            took_s = time.monotonic() - began_s
            for pool in pools:
                pool.shutdown()
            return took_s

        return state.num_bytes / min(quiet(once, until_s) for _ in range(repeats))


def render(found: Sequence[Cell], num_bytes: int, slower: float = 1.0) -> str:
    """The page."""
    best = max(found, key=lambda cell: cell.ratio)
    worst = min(found, key=lambda cell: cell.ratio / cell.allowed)
    lines = [
        "# How long recovery takes",
        "",
        "Written by `python -m experiments.recovery_table"
        f"{f' --slower {slower:g}' * (slower > 1)} > docs/recovery.md`.",
        "",
        *textwrap.wrap(
            f"A state of {num_bytes / 1e6:.0f} MB is put together on the nodes that "
            "are left of four, once by a recovery and once from the far tier alone. "
            "Survivors hold a part of it, each the same; each gives at most "
            f"{LOCAL_BYTES_PER_S / 1e9:g} GB/s. The far tier is a server on loopback "
            "that gives as much as the column says. A cell says how much sooner the "
            "recovery is done, how much sooner it could be at best, and what it took. "
            "At best: by the bytes that only the far tier holds and by the rates as "
            "measured, far tier and survivors read at the same time, and no faster "
            f"than this machine can at all: {found[0].most_bytes_per_s / 1e9:.1f} GB/s "
            "with nothing paced, assigned or assembled. What is at work beside a "
            "recovery makes it be done again."
            + (
                f" The machine was busy: all rates were {slower:g} times lower than "
                "the table says, which changes no ratio that they allow."
                if slower > 1
                else ""
            ),
            88,
        ),
        "",
        *textwrap.wrap(
            f"The least share of what is possible is "
            f"{worst.ratio / worst.allowed:.2f}; the best cell is {best.ratio:.1f} "
            f"times sooner (AutoHet reports {WORTH} times). Whatever is at {LEAST} or "
            "more of what is possible takes at most 1.15 times what it would to read "
            "first what only the far tier holds and then the rest from survivors.",
            88,
        ),
    ]
    rates = sorted({cell.far_bytes_per_s for cell in found})
    for lost in LOST:
        lines += [
            "",
            f"## {('One', 'Two')[lost - 1]} of four nodes lost",
            "",
            "| held by survivors | "
            + " | ".join(f"far tier {rate / 1e9:g} GB/s" for rate in rates)
            + " |",
            "|---|" + "---|" * len(rates),
        ]
        for held in HELD:
            row = [
                cell
                for rate in rates
                for cell in found
                if (cell.lost, cell.held, cell.far_bytes_per_s) == (lost, held, rate)
            ]
            parts = [f"{c.ratio:.2f} / {c.allowed:.2f} ({c.ours_s:.2f} s)" for c in row]
            lines.append(f"| {held:.0%} | " + " | ".join(parts) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, and prints the page."""
    from hexijax.checkpoint.assign import load_solver

    (what, _, _) = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--slower", type=float, default=1.0, help="divides all rates")
    slower = parser.parse_args().slower
    load_solver()
    if "MALLOC_ARENA_MAX" not in os.environ:  # it is read as a process starts
        command = [sys.executable, "-m", "experiments.recovery_table", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEPT_MEMORY})
    flag = f"--xla_force_host_platform_device_count={NODES}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    state = State(max(1, round(ARRAYS / slower)))
    found: list[Cell] = []
    for cell in cells(state, slower=slower):
        found.append(cell)
        print(
            f"{cell.lost} lost, {cell.held:.0%} held, far "
            f"{cell.far_bytes_per_s / 1e9:g} GB/s: {cell.ratio:.2f} of "
            f"{cell.allowed:.2f}, {cell.moved}",
            file=sys.stderr,
        )
    print(render(found, state.num_bytes, slower), end="")


if __name__ == "__main__":
    main()
