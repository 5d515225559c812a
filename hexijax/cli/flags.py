"""Flags of `run` and `launch`, which train.

`launch` takes those of `run` and hands them to its islands: ``to_json``, ``from_json``.
"""

import argparse
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexijax.islands.launcher import JOIN_S
from hexijax.islands.rendezvous import SILENCE_S

PULL_S = 60.0
"""In which anything from another island must have come."""

_PATHS = ("cluster", "profile", "json", "out")


def add_run_flags(run: argparse.ArgumentParser) -> None:
    """Those of `run`."""
    add_training_flags(run)
    run.add_argument(
        "--trace",
        action="store_true",
        help="watch the last step, and write it beside the predicted one: trace.json",
    )
    run.add_argument(
        "--island",
        metavar="NAME|I|auto",
        help="be this island of a job that `launch` holds together; auto: as Slurm, "
        "Kubernetes or MPI numbers it",
    )
    run.add_argument(
        "--of", type=positive, metavar="N", help="of so many; checked when it joins"
    )
    run.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where `launch` listens for islands (default: $HEXIJAX_RENDEZVOUS)",
    )
    run.add_argument(
        "--transfer",
        metavar="HOST:PORT",
        help="where other islands reach this one (default: a free port of the address "
        "by which it reaches the rendezvous)",
    )


def add_launch_flags(launch: argparse.ArgumentParser) -> None:
    """Those of `launch`."""
    add_training_flags(launch)
    launch.add_argument(
        "--local",
        nargs="?",
        type=positive,
        const=0,
        metavar="N",
        help="start the islands here; N: so many, of neighbouring nodes",
    )
    launch.add_argument(
        "--ssh",
        type=Path,
        metavar="FILE",
        help="start one on each host of a cluster file, which it also trains on",
    )
    launch.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="start them as actors of a Ray cluster; auto: this machine's",
    )
    add_host_flags(launch)
    launch.add_argument(
        "--serve",
        action="store_true",
        help="start none: others do, with run --island --rendezvous",
    )
    launch.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="where islands meet (default: a free port of 127.0.0.1, with --ssh of "
        "this machine's address)",
    )
    for flag, default, what in (
        ("--silence", SILENCE_S, "without a word from it an island is lost"),
        ("--wait", JOIN_S, "until all islands must be there"),
        ("--pull", PULL_S, "in which what another island sends must have come"),
    ):
        launch.add_argument(
            flag,
            type=_above_zero,
            default=default,
            metavar="S",
            help=f"seconds {what} (default: {default:g})",
        )


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """Of commands that reach other hosts."""
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="Python on the hosts (default: the path of this one)",
    )
    parser.add_argument(
        "--folder",
        default=os.getcwd(),
        metavar="DIR",
        help="where hosts have the project (default: this folder's path)",
    )


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Those of both."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue a saved run (default: the experiment's last one)",
    )
    parser.add_argument(
        "--save-every",
        type=positive,
        default=0,
        metavar="N",
        help="save every N steps, and not only at the end",
    )
    parser.add_argument("--no-save", action="store_true", help="save nothing")
    parser.add_argument(
        "--keep",
        type=positive,
        default=2,
        metavar="N",
        help="steps kept in each place that is saved to (default: 2)",
    )
    parser.add_argument(
        "--fast",
        metavar="DIR",
        help="save in here and not in the run's folder: another disk, /dev/shm",
    )
    parser.add_argument(
        "--far",
        metavar="PATH",
        help="a path or URL that outlives the machines (gs://, s3://, any fsspec's)",
    )
    parser.add_argument(
        "--far-every",
        type=positive,
        default=0,
        metavar="N",
        help="send every Nth step there, and not only the last",
    )
    parser.add_argument(
        "--far-rate",
        type=float,
        default=math.inf,
        metavar="GB/S",
        help="send no faster than that (default: as fast as it goes)",
    )
    parser.add_argument(
        "--neighbour-every",
        type=positive,
        default=0,
        metavar="N",
        help="copy each node's state into its neighbour's memory every N steps",
    )
    parser.add_argument(
        "--elastic",
        nargs="?",
        const="",
        metavar="NODES",
        help="outlive nodes and take in others; NODES, with commas: who begins",
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="let forced CPU devices stand for the cluster's",
    )
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")


def to_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags that all islands share."""
    own = argparse.ArgumentParser(add_help=False)
    add_training_flags(own)
    names = [action.dest for action in own._actions]
    names += ["experiment", "cluster", "profile", "plan", "set", "json", "out"]
    values = {name: getattr(arguments, name) for name in names}
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


def from_json(flags: Mapping[str, Any]) -> argparse.Namespace:
    """What ``to_json`` wrote."""
    paths = {k: Path(flags[k]) for k in _PATHS if flags.get(k) is not None}
    return argparse.Namespace(**{**flags, **paths})


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} was given; at least 1 is needed")
    return number


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} was given; it must be above 0")
    return value
