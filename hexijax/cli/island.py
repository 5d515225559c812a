"""`hexijax run --island`: be one island of a job that a launcher holds together.

    environment, flags -> Member -> brief: plan, folder, flags -> Islanded -> train

It finds the launcher before it imports JAX, so that it is watched, and ends if the
launcher does, from its first moment on.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from hexijax.cli import flags as cli_flags
from hexijax.cli.fields import read_source
from hexijax.cli.loading import find_experiment, load_experiment, project_root
from hexijax.cli.session import Session
from hexijax.cli.settings import parse_settings
from hexijax.cli.surroundings import AUTO, RENDEZVOUS, place
from hexijax.cluster import Cluster
from hexijax.elastic.notice import on_sigterm
from hexijax.errors import UserError
from hexijax.islands.member import LOST, Dismissed, LauncherGone, Member
from hexijax.islands.processes import PARENT, end_with_launcher
from hexijax.islands.wire import TOKEN, joined
from hexijax.islands.world import IslandLost, Welcome
from hexijax.job import platform
from hexijax.report import RunFolder

FIND_S = 60.0
"""For the launcher to come up."""

FAULT, INTERRUPTED = 70, 130


def run_island(arguments: argparse.Namespace) -> int:
    """Trains its part; returns the exit code."""
    end_with_launcher()
    token = os.environ.get(TOKEN)
    rendezvous = arguments.rendezvous or os.environ.get(RENDEZVOUS)
    if not rendezvous or not token:
        missing = "--rendezvous HOST:PORT" if not rendezvous else TOKEN
        raise UserError(
            f"--island {arguments.island}: {missing} is not given. An island joins a "
            "job that hexijax launch holds together, which says where it listens; "
            f"{TOKEN} is the secret of that run."
        )
    island, of = arguments.island, arguments.of
    if island == AUTO:
        found = place(os.environ)
        island, of = found.island, of or found.of
    member = Member.connect(rendezvous, island, token=token, seconds=FIND_S, of=of)
    code = FAULT
    words: dict[str, object] = {}
    try:
        welcome = member.welcome(-1, float("inf"))
        with _noticing(member, welcome):
            code, words = _train(member, welcome, arguments)
    except Dismissed:
        code = 0
        print(f"The plan has nothing for island {member.name}; it ends.", flush=True)
    except (IslandLost, LauncherGone) as error:
        code = LOST
        print(f"Error: {error}", file=sys.stderr, flush=True)
    except UserError as error:
        code, words["error"] = 2, str(error)
        raise
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        member.leave(code, **words)
    return code


def _noticing(
    member: Member, welcome: Welcome
) -> contextlib.AbstractContextManager[None]:
    """While it lasts, SIGTERM asks all to halt and to save: a scheduler takes the job.

    Not where a launcher of this machine sends it, which has asked already; nor where
    others can go on: those are told by our end.
    """
    if PARENT in os.environ or welcome.brief["elastic"]:
        return contextlib.nullcontext()
    return on_sigterm(member.ask_stop)


def _train(
    member: Member, welcome: Welcome, arguments: argparse.Namespace
) -> tuple[int, dict[str, object]]:
    flags = cli_flags.from_json(welcome.brief["flags"])
    flags.json, flags.experiment = None, arguments.experiment
    cluster = Cluster.from_json(welcome.brief["whole"])
    source = read_source(find_experiment(arguments.experiment))
    values = parse_settings(flags.set, source)
    platform.prepare(cluster, cpu=flags.cpu, emulate=flags.emulate, island=member.name)
    experiment = load_experiment(source, values)

    from hexijax.cli.beginning import choices
    from hexijax.cli.training import train
    from hexijax.islands.transfer import start_server
    from hexijax.job.digests import code_digest, data_digest
    from hexijax.job.intake import trace_chain
    from hexijax.job.islands import Islanded
    from hexijax.job.screen import Screen

    screen, folder = Screen(), RunFolder(Path(str(welcome.brief["folder"])))
    folder.path.mkdir(parents=True, exist_ok=True)
    chain = trace_chain(experiment)
    transfer = arguments.transfer or joined(member.host, 0)
    job = Islanded(
        member=member,
        welcome=welcome,
        start_server=lambda: start_server(transfer),
        experiment=experiment,
        chain=chain,
        facts={
            "code": code_digest(source.path, project_root(source.path)),
            "data": data_digest(experiment),
        },
        folder=folder,
        emulate=flags.emulate,
        say=screen.say,
        progress=screen.compiling,
    )
    job.begin()
    code = train(
        flags,
        Session(source=source, experiment=experiment, cluster=cluster, settings=values),
        choices=choices(flags),
        screen=screen,
        chain=chain,
        job=job,
        resumed=folder,
    )
    report = folder.report
    if job.leads and report.is_file():
        import json

        return code, {"report": json.loads(report.read_text())}
    return code, {}
