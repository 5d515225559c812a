"""`hexijax launch`: one job over islands, each a process with a JAX client of its own.

    arguments -> prepare (a process) -> brief: plan, folder
    Rendezvous, Launcher -> islands: hexijax run --island NAME --rendezvous HOST:PORT

This process imports no JAX, so that nothing that happens to a device happens to it.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hexijax.cli import flags as cli_flags
from hexijax.cli.prepare import Unprepared, prepare
from hexijax.cli.replanning import Replanner, used
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.islands import on_ray
from hexijax.islands.launcher import Launcher, Outcome, Start
from hexijax.islands.processes import Started
from hexijax.islands.rendezvous import Rendezvous
from hexijax.islands.ssh import Remote, address_of, own_address
from hexijax.islands.wire import TOKEN, checked, joined, new_token, split_address
from hexijax.plan import serial
from hexijax.report.words import listed

LOGS = "logs"
"""In a run's folder: a file an island."""


def launch(arguments: argparse.Namespace) -> int:
    """Trains over islands; returns the exit code."""
    _check(arguments)
    if arguments.ssh is not None:
        arguments.cluster = arguments.ssh
    shared = cli_flags.to_json(arguments)
    try:
        brief = prepare(shared, arguments.local or 0)
    except Unprepared as error:
        return error.code
    saved = serial.loads(str(brief["plan"]).encode(), "the plan")
    brief |= {
        "elastic": arguments.elastic is not None,
        "wait_s": arguments.wait,
        "pull_s": arguments.pull,
        "silence_s": arguments.silence,
        "whole": saved.cluster.to_json(),  # plans of later generations may use less
    }
    islands = used(saved.plan, saved.cluster)
    everyone = tuple(saved.cluster.islands)
    if len(everyone) < 2:
        raise UserError(
            f"launch: cluster {saved.cluster.name!r} is one island, "
            f"{everyone[0]!r}, which hexijax run drives. Ask for --local N to put its "
            "nodes into N, or describe more nodes in the cluster file."
        )
    for name in everyone:
        if name not in islands:
            print(f"note: the plan gives island {name} no work; it is not started")
    meeting = Rendezvous(
        islands,
        run=Path(str(brief["folder"])).name,
        known=everyone,
        token=os.environ.get(TOKEN) or new_token(),
        address=arguments.listen or joined(_listens_at(arguments, saved.cluster), 0),
        silence_s=arguments.silence,
        say=print,
    )
    meeting.brief(brief)
    with contextlib.ExitStack() as stack:
        stack.callback(meeting.close)
        start: Start | None = None
        replan: Replanner | None = None
        log = Log(Path(str(brief["folder"])) / LOGS, meeting)
        if arguments.serve:
            _tell_how(arguments, meeting, islands)
        elif arguments.ssh is not None:
            start = _by_ssh(arguments, meeting, saved.cluster, log)
        elif arguments.ray is not None:
            start = _by_ray(arguments, meeting, saved.cluster, log)
        else:
            start = _local(arguments, meeting, saved.cluster, log)
        if arguments.elastic is not None:
            replan = stack.enter_context(Replanner(brief, saved))
        outcome = Launcher(
            meeting,
            start,
            replan=replan,
            restart=True,
            join_s=arguments.wait,
            say=_say,
        ).run()
    _finish(arguments, outcome)
    return outcome.code


def _check(arguments: argparse.Namespace) -> None:
    ways = {
        "--local": arguments.local is not None,
        "--ssh": arguments.ssh is not None,
        "--ray": arguments.ray is not None,
        "--serve": arguments.serve,
    }
    chosen = [way for way, given in ways.items() if given]
    if len(chosen) != 1:
        many = "both" if len(chosen) == 2 else "all"
        said = (
            f"{listed(chosen)} were {many}" if chosen else "no way to start islands was"
        )
        raise UserError(
            f"launch: {said} given. Choose one of "
            f"{', '.join(ways)}: here as processes, on the hosts of a file, by Ray, or "
            "by others who are told where."
        )
    if arguments.listen is not None:
        split_address(arguments.listen)
    if token := os.environ.get(TOKEN):
        checked(token)
    if arguments.ssh is not None and arguments.cluster is not None:
        raise UserError(
            f"--ssh {arguments.ssh} and --cluster {arguments.cluster} were both given: "
            "the file that says which hosts there are is the cluster. Leave --cluster "
            "out."
        )
    if arguments.elastic:
        raise UserError(
            f"launch --elastic {arguments.elastic}: names of nodes are for a run in "
            "one process. Here all islands of the cluster begin: leave the names out."
        )
    if arguments.neighbour_every:
        raise UserError(
            f"launch --neighbour-every {arguments.neighbour_every}: copies in a "
            "neighbour's memory are for nodes of one process; islands go on from what "
            "is on disk. Use --save-every, with --fast in a folder that all see."
        )
    if arguments.elastic is not None and arguments.no_save:
        raise UserError(
            "--elastic and --no-save were both given: islands that are left go on from "
            "what was saved. Leave one of the two out."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """Where islands' lines go."""

    folder: Path
    meeting: Rendezvous

    def of(self, island: str) -> Path:
        """The file of one."""
        return self.folder / f"{island}.log"

    def shows(self, island: str) -> bool:
        """Whether the screen shows it, too: the first, which writes what the run
        leaves."""
        return island in self.meeting.islands[:1]

    def tell(self, island: str, line: str) -> None:
        """Takes a line, besides the file."""
        if self.shows(island):
            _say(line)


def _local(
    arguments: argparse.Namespace,
    meeting: Rendezvous,
    cluster: Cluster,
    log: Log,
) -> Start:
    """Starts islands on this machine."""
    cards = visible_cards(cluster) if not arguments.emulate else {}

    def start(name: str) -> Started:
        return Started(
            name,
            island_command(arguments.experiment, name, meeting.address),
            log=log.of(name),
            environ={**_environ(meeting), **cards.get(name, {})},
            tell=log.tell,
        )

    return start


def _by_ssh(
    arguments: argparse.Namespace,
    meeting: Rendezvous,
    cluster: Cluster,
    log: Log,
) -> Start:
    """Starts islands on the hosts of their nodes."""
    hosts = {name: _host(cluster, name) for name in meeting.known}

    def start(name: str) -> Started:
        words = island_command(arguments.experiment, name, meeting.address)

        def process() -> int | None:
            there = meeting.where(name)
            return there[1] if there else None

        return Remote(
            name,
            hosts[name],
            [arguments.python, *words[1:]],
            folder=arguments.folder,
            token=meeting.token,
            log=log.of(name),
            process=process,
            tell=log.tell,
        )

    return start


def _by_ray(
    arguments: argparse.Namespace,
    meeting: Rendezvous,
    cluster: Cluster,
    log: Log,
) -> Start:
    """Starts islands as actors of a Ray cluster."""
    on_ray.connect(arguments.ray)

    def start(name: str) -> on_ray.RayIsland:
        devices = [cluster.device(device) for device in cluster.islands[name]]
        cards = [d.kind for d in devices if d.profile.vendor != "cpu"]
        kinds = [] if arguments.emulate else cards
        words = island_command(arguments.experiment, name, meeting.address)
        return on_ray.RayIsland(
            name,
            [arguments.python, *words[1:]],
            asks=on_ray.needs(name, kinds, on_ray.resources()),
            environ=_environ(meeting),
            log=log.of(name),
            shown=log.shows(name),
        )

    return start


def _environ(meeting: Rendezvous) -> dict[str, str]:
    """What an island's process is told beside its words."""
    return {
        TOKEN: meeting.token,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "PYTHONUNBUFFERED": "1",
    }


def _host(cluster: Cluster, island: str) -> str:
    """The one host of an island."""
    hosts = {n.host or n.name: None for n in cluster.nodes if n.island == island}
    if len(hosts) > 1:
        raise UserError(
            f"--ssh: island {island!r} lies on the hosts {', '.join(hosts)}, and an "
            "island is one process on one host. Leave `island` out of their nodes."
        )
    return next(iter(hosts))


def _listens_at(arguments: argparse.Namespace, cluster: Cluster) -> str:
    """This machine's address: loopback, unless islands are elsewhere."""
    if arguments.ray is not None:
        return on_ray.connect(arguments.ray)
    if arguments.ssh is None:
        return "127.0.0.1"
    first = next(iter(cluster.islands))
    return own_address(address_of(_host(cluster, first)))


def island_command(experiment: str, name: str, address: str) -> list[str]:
    """The words that start an island."""
    run = [sys.executable, "-m", "hexijax.cli.main", "run", experiment]
    return [*run, "--island", name, "--rendezvous", address]


def visible_cards(
    cluster: Cluster, seen: Mapping[str, str] = os.environ
) -> Mapping[str, dict[str, str]]:
    """Which of this machine's cards each island sees: theirs, one after another, of
    those that this process may see."""
    environ: dict[str, dict[str, str]] = {}
    taken = collections.Counter[str]()
    for island, names in cluster.islands.items():
        devices = [cluster.device(name) for name in names]
        count = sum(device.profile.vendor != "cpu" for device in devices)
        vendors = {device.profile.vendor for device in devices} - {"cpu"}
        amd = "amd" in vendors
        variable = "HIP_VISIBLE_DEVICES" if amd else "CUDA_VISIBLE_DEVICES"
        first = taken[variable]
        last = first + count
        cards = seen[variable].split(",") if seen.get(variable) else None
        ids = cards[first:last] if cards else map(str, range(first, last))
        environ[island] = {variable: ",".join(ids)}
        taken[variable] = last
    return environ


def _tell_how(
    arguments: argparse.Namespace, meeting: Rendezvous, islands: Iterable[str]
) -> None:
    names = ", ".join(islands)
    if TOKEN not in os.environ:
        raise UserError(
            f"launch --serve: {TOKEN} is not set, so nobody could join. Set it to a "
            "secret of your own here and for every island."
        )
    print(
        f"rendezvous at {meeting.address}; islands {names}. Start each with "
        f"hexijax run {arguments.experiment} --island NAME --rendezvous "
        f"{meeting.address}, and {TOKEN} in its environment.",
        flush=True,
    )


def _finish(arguments: argparse.Namespace, outcome: Outcome) -> None:
    """Writes what --json asked for: the report of the island that led."""
    reports: list[Any] = [x["report"] for x in outcome.said.values() if "report" in x]
    report = reports[0] if reports else None
    if arguments.json and report is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _say(line: str) -> None:
    print(line, flush=True)
