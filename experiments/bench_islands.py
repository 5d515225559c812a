"""Islands on real cards: right, as fast as one process, by which paths, on slow links,
beside a slower card.

Run:     python -m experiments.bench_islands --out FOLDER
         (--small, to see that it works, takes CPU devices: two minutes on two cores)
Needs:   two Hopper cards of one host; with one, what takes two is left out; 9 minutes;
         for ``slow`` NVIDIA MPS and CuPy
Expect:  docs/performance.md

Islands are started as ``hexijax launch`` starts them, and meet at its rendezvous. A
slow link is our sender held to a rate; the step on it is predicted from layers and
latencies that were timed on the same card. Plans are written here, none is searched.
For ``slow`` multiprocessors of the second card are held by another program; it comes
last, so that nothing else meets what that leaves behind.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benching import Bench
from experiments.emulated.slowing import holding, mps
from experiments.islanded import settings
from experiments.islanded.table import ALONE, APART, section
from hexijax.cluster import Cluster
from hexijax.islands.launcher import Launcher
from hexijax.islands.processes import Started
from hexijax.islands.rendezvous import Rendezvous
from hexijax.islands.wire import TOKEN
from hexijax.job.intake import trace_chain, training_facts
from hexijax.planner import PlanOptions
from hexijax.simulator import predict

PARTS = ("mixed", "paths", "pipeline", "profile", "limited", "slow")
"""In the order in which they run."""

RATES = (1.25e9, 0.125e9)
"""Bytes a second of slow links: 10 and 1 Gbit/s."""

MODULE = "experiments.islanded.process"
MOST_S = 150.0
"""For a process that is alone."""

SILENCE_S, JOIN_S = 60.0, 120.0


class IslandsBench(Bench):
    """And what kind the cards are."""

    kind = settings.CPU_KIND
    cards = 2
    numbers = itertools.count()

    def brief(
        self, cluster: Cluster | None, given: Mapping[str, Any]
    ) -> tuple[str, Path]:
        """A name for the logs, and a file for processes."""
        name = f"{next(self.numbers):02}"
        file = self.work / f"{name}.json"
        text = json.dumps(
            {"cluster": cluster and cluster.to_json(), "given": dict(given)}
        )
        file.write_text(text)
        return name, file

    def alone(
        self, task: str, cluster: Cluster | None, cards: Sequence[int], **given: Any
    ) -> Any:
        """What one process finds; without a cluster, on what it has."""
        name, file = self.brief(cluster, given)
        result = self.work / f"{name}.result.json"
        command = self.python(MODULE, task, file, "--result", result)
        self.start(f"{name} {task}", cards, *command).wait(MOST_S)
        return json.loads(result.read_text())

    def together(
        self,
        task: str,
        cluster: Cluster,
        cards: Mapping[str, Sequence[int]],
        **given: Any,
    ) -> dict[str, Any]:
        """What each island finds.

        Raises:
          RuntimeError: one failed; in its launcher's words.
        """
        prefix, file = self.brief(cluster, given)
        said: list[str] = []
        meeting = Rendezvous(tuple(cluster.islands), run=task, silence_s=SILENCE_S)
        meeting.brief({})

        def start(name: str) -> Started:
            words = ["--island", name, "--rendezvous", meeting.address]
            secret = {TOKEN: meeting.token}
            return Started(
                name,
                self.python(MODULE, task, file, *words),
                log=self.work / f"{prefix}_{task}_{name}.log",
                environ=self.child_environment(cards[name]) | secret,
            )

        outcome = Launcher(meeting, start, join_s=JOIN_S, say=said.append).run()
        if outcome.code:
            raise RuntimeError("\n".join(said)[-600:])
        return {name: words["found"] for name, words in outcome.said.items()}


def bench_all(bench: IslandsBench, parts: Sequence[str]) -> None:
    """The parts asked for."""
    found = bench.found

    def look() -> None:
        seen = bench.alone("look", None, range(2))
        kind = seen.pop("kind")
        bench.kind = bench.kind if bench.small else kind
        bench.cards = seen["cards"]
        bench.rows["what"] |= seen

    bench.part("look", look)
    if "look" in found["failed"]:
        return
    todo = {
        "mixed": mixed,
        "paths": paths,
        "pipeline": pipeline,
        "profile": profile,
        "limited": limited,
        "slow": slow,
    }
    for part in PARTS:
        if part in parts:
            todo[part](bench)


def mixed(bench: IslandsBench) -> None:
    """A card's island and the CPU's."""

    def run() -> None:
        cluster = settings.cluster(bench.kind, settings.CPU_KIND)
        told = bench.together("mixed", cluster, {"one": (0,), "two": ()})
        bench.found["mixed"] = told

    bench.part("mixed", run)


def paths(bench: IslandsBench) -> None:
    """Rates by size."""
    setting = settings.small() if bench.small else settings.large()
    sizes = list(setting.sizes)
    cluster = settings.cluster(bench.kind)
    found = bench.found.setdefault("paths", {})
    pair = (0, 1) if bench.cards > 1 else (0,)

    def inside() -> None:
        found["inside"] = bench.alone("inside", one_client(bench), pair, sizes=sizes)

    def cards() -> None:
        told = bench.together("between", cluster, apart(bench), sizes=sizes)
        found["between"] = told["two"]

    def host() -> None:
        mixed = settings.cluster(bench.kind, settings.CPU_KIND)
        told = bench.together(
            "between", mixed, {"one": (0,), "two": ()}, sizes=sizes, wide=False
        )
        found["to the CPU"] = told["two"]

    bench.part("paths inside", inside)
    bench.part("paths between", cards)
    bench.part("paths to the CPU", host)


def one_client(bench: IslandsBench) -> Cluster:
    """What a process that is alone sees."""
    made = settings.cluster(bench.kind)
    return made if bench.cards > 1 else made.without("two")


def apart(bench: IslandsBench) -> dict[str, tuple[int, ...]]:
    """Each island's cards: with one card they share it."""
    return {"one": (0,), "two": (1 % bench.cards,)}


def pipeline(bench: IslandsBench) -> None:
    """One plan, in one process and in two islands."""
    if bench.cards > 1:
        both(bench, "pipeline", settings.cluster(bench.kind))


def both(bench: IslandsBench, part: str, cluster: Cluster, **given: Any) -> None:
    """Both ways of that plan, one after the other."""
    found = bench.found.setdefault(part, {})
    given |= {"small": bench.small}

    def alone() -> None:
        found[ALONE] = bench.alone("pipeline", cluster, (0, 1), **given)

    def islands() -> None:
        found[APART] = bench.together("pipeline", cluster, apart(bench), **given)

    bench.part(f"{part} in one process", alone)
    bench.part(f"{part} in islands", islands)


def profile(bench: IslandsBench) -> None:
    """Layers, for what is predicted."""

    def run() -> None:
        cluster = settings.cluster(bench.kind).without("two")
        told = bench.alone("profile", cluster, (0,), small=bench.small)
        bench.found["profile"] = told

    bench.part("profile", run)


def limited(bench: IslandsBench) -> None:
    """The pipeline over links of each rate, and what was predicted."""
    if bench.cards < 2 or "profile" not in bench.found:
        return
    found = bench.found.setdefault("limited", {})
    for rate in RATES:

        def run(rate: float = rate) -> None:
            told = bench.together(
                "pipeline",
                linked(bench, rate),  # the order of instructions follows from links
                apart(bench),
                small=bench.small,
                bytes_per_s=rate,
            )
            step_s = told["one"]["step_s"]
            found[f"{rate / 1e9:g}"] = {
                "bytes_per_s": rate,
                "step_s": step_s,
                "predicted_s": predicted_s(bench, rate),
                "islands": told,
            }

        bench.part(f"limited to {rate / 1e9:g} GB/s", run)


def slow(bench: IslandsBench) -> None:
    """The pipeline beside a card that is made slower, in one process and in islands."""
    if bench.cards < 2:
        return
    found: dict[str, Any] = bench.found.setdefault("slow", {})

    def check(when: str) -> None:
        result = bench.work / f"products_{when}.json"
        size = ("--setting", "small" if bench.small else "pair")
        command = bench.python("experiments.emulated.checking", result, *size)
        bench.start(f"products {when}", (0, 1), *command).wait(MOST_S)
        found[when] = json.loads(result.read_text())

    with contextlib.ExitStack() as stack:

        def hold() -> None:
            environment = stack.enter_context(mps(bench.work))
            if not environment:
                raise RuntimeError("no MPS: programs would take turns on the card")
            bench.environment = dict(environment)
            whole = dataclasses.replace(settings.SLOW.hold, keep_gib=None)
            seconds = bench.left_s + 30
            said = stack.enter_context(holding((whole,), environment, seconds))
            found.update(said=said, held=whole.multiprocessors)

        if bench.small:
            found["held"] = 0
        else:
            bench.part("slow", hold)
        if "held" not in found:
            return
        bench.part("slow, products before", lambda: check("before"))
        both(bench, "slow", settings.cluster(bench.kind, slow=True), slow=True)
        bench.part("slow, products after", lambda: check("after"))


def predicted_s(bench: IslandsBench, rate: float) -> float:
    """Of the pipeline's step over a link of that rate."""
    setting = settings.small() if bench.small else settings.large()
    chain = trace_chain(setting.experiment)
    plan = settings.pipeline(setting, chain)
    cluster = linked(bench, rate)
    options = PlanOptions.of(training_facts(setting.experiment))
    return predict(plan, chain, cluster, rules=options.rules(plan)).step_s


def linked(bench: IslandsBench, rate: float) -> Cluster:
    """Both cards, as they were timed, with a link of that rate between them."""
    return settings.cluster(
        bench.kind,
        gb_per_s=rate / 1e9,
        latency_us=latency_s(bench) * 1e6,
        rows=tuple(bench.found["profile"]["rows"]),
    )


def latency_s(bench: IslandsBench) -> float:
    """Of the smallest message between islands; a fifth of a millisecond if unknown."""
    rows = bench.found.get("paths", {}).get("between", ())
    seconds = [row["s"] for row in rows if row["path"] == "between islands"]
    return min(seconds, default=200e-6)


def say(rows: Mapping[str, Any]) -> str:
    """A few words for whoever waits."""
    return "\n".join(section(rows["islands"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=520.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_islands"))
    args = parser.parse_args()
    words = "" if tuple(args.parts) == PARTS else f" --parts {' '.join(args.parts)}"
    bench = IslandsBench(
        "islands",
        f"bench_islands{words}",
        out=args.out,
        seconds=args.seconds,
        small=args.small,
    )
    bench.run(lambda: bench_all(bench, args.parts), say)


if __name__ == "__main__":
    main()
