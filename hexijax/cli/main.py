"""The `hexijax` command.

    0 done   1 the run diverged   2 bad input   3 an island was lost
    70 a fault in code   130 Ctrl-C

A fault of the input is one message and no traceback; HEXIJAX_TRACEBACK=1 shows it. A
fault in code, the experiment's or ours, keeps its traceback.
"""

import argparse
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import hexijax
from hexijax.cli.flags import (
    add_host_flags,
    add_launch_flags,
    add_run_flags,
    positive,
)
from hexijax.cli.words import check_words
from hexijax.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser, words = _parser(), list(sys.argv[1:] if argv is None else argv)
    try:
        check_words(parser, words)
        arguments = parser.parse_args(words)
        return arguments.start(arguments)
    except UserError as error:
        if os.environ.get("HEXIJAX_TRACEBACK"):
            raise
        kind = "Error" if type(error) is UserError else type(error).__name__
        print(f"{kind}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `hexijax catalog | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # 1 would read as a diverged run
        traceback.print_exc()
        return 70


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hexijax",
        description="Train Flax models on clusters whose accelerators differ.",
    )
    parser.add_argument("--version", action="version", version=hexijax.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    add_run_flags(_with_experiment(commands, "run", "train", _run, out="runs"))
    launch = _with_experiment(
        commands, "launch", "train over islands, a process each", _launch, out="runs"
    )
    add_launch_flags(launch)

    _with_page(
        _with_objective(
            _planning(commands, "plan", "search, explain and save a plan", _plan)
        )
    )
    _planning(
        commands,
        "simulate",
        "a plan's step on a timeline: a table, a trace, a picture",
        _simulate,
    )
    _with_page(
        _with_objective(
            _planning(commands, "explain", "what limits a plan, and why", _explain)
        )
    )
    _with_page(
        _with_objective(
            _planning(commands, "compare", "our plan beside the baselines'", _compare)
        )
    )
    whatif = _planning(
        commands, "whatif", "the same on other machines, and each card's worth", _whatif
    )
    _with_objective(whatif)
    for flag, metavar, what in (
        ("--add", "KIND:N[@NODE]", "add N cards, in a node of their own or in NODE"),
        ("--drop", "NODE", "leave out a node or a device, as box or box/1"),
        ("--link", "A-B=RATE", "join two nodes at RATE GB/s, or 100Gbit/s"),
    ):
        whatif.add_argument(
            flag, action="append", default=[], metavar=metavar, help=what
        )
    whatif.add_argument(
        "--tokens", type=_seconds, metavar="N", help="say how many days N tokens take"
    )

    _with_profile(commands)
    _with_export(commands)

    new = commands.add_parser("new", help="a project of your own, which runs at once")
    new.add_argument("folder", type=Path, metavar="DIR", help="empty, or not there yet")
    new.set_defaults(start=_new)

    _with_hosts(commands)

    catalog = commands.add_parser("catalog", help="print the known cards")
    catalog.set_defaults(start=_catalog)

    doctor = commands.add_parser("doctor", help="say what is wrong with this setup")
    doctor.add_argument("--cpu", action="store_true", help="do without GPUs")
    doctor.set_defaults(start=_doctor)
    return parser


def _with_experiment(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    what: str,
    start: Callable[[argparse.Namespace], int],
    *,
    out: str,
) -> argparse.ArgumentParser:
    """A command on an experiment, whose --help also lists the experiment's fields."""
    parser = commands.add_parser(name, help=what, add_help=False)
    parser.set_defaults(start=start, parser=parser)
    parser.add_argument(
        "experiment",
        nargs="?",
        metavar="EXPERIMENT",
        help="a file, or a module as in experiments.quickstart"
        + ("" if out == "runs" else "; or a plan.json, which needs neither"),
    )
    parser.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="show this and the experiment's fields",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="cluster file, over the experiment's",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="measured figures, over the cluster's: as `hexijax profile` writes them",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE|single",
        help="a plan.txt or plan.json; single: one device, plainly",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the experiment",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(out),
        metavar="DIR",
        help=f"where folders are made (default: {out})",
    )
    return parser


def _planning(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    what: str,
    start: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """A command that needs no device, on an experiment or on a plan.json alone."""
    parser = _with_experiment(
        commands, name, f"{what}; no device used", start, out="plans"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        metavar="S",
        help="wall time of each search; the plan then depends on the machine",
    )
    return parser


def _with_objective(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """What plans are chosen by; the words are those of ``planner.Objective``."""
    parser.add_argument(
        "--objective",
        choices=("step", "price", "energy"),
        default="step",
        help="choose by seconds of a step, dollars or joules a token (default: step)",
    )
    parser.add_argument(
        "--price", type=Path, metavar="FILE", help="prices of kinds, a TOML file"
    )
    return parser


def _with_page(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page to send round"
    )


def _with_profile(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = commands.add_parser(
        "profile", help="measure this machine's devices and links for plans to use"
    )
    parser.set_defaults(start=_profile)
    parser.add_argument(
        "experiment", metavar="EXPERIMENT", help="whose layers and optimizer are timed"
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="what this machine is called, over the experiment's",
    )
    parser.add_argument(
        "--node", metavar="NAME", help="this machine is that node of the cluster"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the experiment",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("profile.toml"),
        metavar="FILE",
        help="the profile file, which is gone on with (default: profile.toml)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=240.0,
        metavar="S",
        help="begin nothing new after so many (default: 240)",
    )
    parser.add_argument(
        "--sizes",
        type=positive,
        nargs="+",
        metavar="N",
        help="microbatches whose layers are timed (default: 1, 2, 4, ... up to the "
        "batch, at most 64)",
    )
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")


def _with_export(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """The words of --to and --dtype are those of ``weights.export``."""
    parser = commands.add_parser(
        "export", help="a run's parameters, for others to read"
    )
    parser.set_defaults(start=_export)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--to",
        choices=("orbax", "safetensors"),
        required=True,
        help="an Orbax folder of the plain Flax tree, or a safetensors file",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="where to (default: orbax or safetensors in the run's folder)",
    )
    parser.add_argument(
        "--names",
        choices=("llama", "gpt2", "bert", "vit"),
        help="name tensors as Hugging Face's model of that family does",
    )
    parser.add_argument(
        "--step", type=positive, metavar="N", help="a saved step (default: the last)"
    )
    parser.add_argument(
        "--dtype",
        choices=("came-as", "float32", "bfloat16", "float16"),
        default="came-as",
        help="of the numbers (default: that of the weights the run began with, or "
        "float32)",
    )


def _with_hosts(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = commands.add_parser(
        "cluster", help="several hosts to one cluster file, and a file against hosts"
    )
    parser.set_defaults(start=_cluster)
    parser.add_argument("action", choices=("init", "check"))
    parser.add_argument("file", nargs="?", type=Path, help="to check")
    parser.add_argument("--ssh", metavar="A,B,C", help="hosts, as ssh knows them")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("lab.toml"),
        metavar="FILE",
        help="the file to write (default: lab.toml)",
    )
    parser.add_argument(
        "--no-rates", action="store_true", help="do not time the links between hosts"
    )
    add_host_flags(parser)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} was given; it must be above 0")
    return value


def _run(arguments: argparse.Namespace) -> int:
    if _helped(arguments):
        return 0
    if arguments.island is not None:
        from hexijax.cli.island import run_island

        return run_island(arguments)
    from hexijax.cli.run import run

    return run(arguments)


def _launch(arguments: argparse.Namespace) -> int:
    if _helped(arguments):
        return 0
    from hexijax.cli.launch import launch

    return launch(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    if _helped(arguments):
        return 0
    from hexijax.cli.plan import plan

    return plan(arguments)


def _simulate(arguments: argparse.Namespace) -> int:
    if _helped(arguments):
        return 0
    from hexijax.cli.simulate import run_simulation

    return run_simulation(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    if _helped(arguments):
        return 0
    from hexijax.cli.explain import explain_plan

    return explain_plan(arguments)


def _compare(arguments: argparse.Namespace) -> int:
    if _helped(arguments):
        return 0
    from hexijax.cli.compare import compare

    return compare(arguments)


def _whatif(arguments: argparse.Namespace) -> int:
    if _helped(arguments):
        return 0
    from hexijax.cli.whatif import whatif

    return whatif(arguments)


def _profile(arguments: argparse.Namespace) -> int:
    from hexijax.cli.profile import profile

    return profile(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from hexijax.cli.export import run_export

    return run_export(arguments)


def _new(arguments: argparse.Namespace) -> int:
    from hexijax.cli.new import new

    return new(arguments)


def _catalog(arguments: argparse.Namespace) -> int:
    del arguments
    from hexijax.cli.catalog import catalog

    return catalog()


def _cluster(arguments: argparse.Namespace) -> int:
    from hexijax.cli.cluster import cluster

    return cluster(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from hexijax.cli.doctor import doctor

    return doctor(cpu=arguments.cpu)


def _helped(arguments: argparse.Namespace) -> bool:
    """Whether help was asked for, and given."""
    resume = getattr(arguments, "resume", None)
    if arguments.experiment is None and resume and resume.endswith(".py"):
        # `run --resume EXPERIMENT`: argparse took it for the RUN.
        arguments.experiment, arguments.resume = resume, ""
    if not arguments.help:
        if arguments.experiment is None:
            arguments.parser.error("name an EXPERIMENT, as experiments/quickstart.py")
        return False
    arguments.parser.print_help()
    if arguments.experiment is not None:
        from hexijax.cli.help import experiment_help

        print(f"\n{experiment_help(arguments.experiment)}")
    return True


if __name__ == "__main__":
    sys.exit(main())
