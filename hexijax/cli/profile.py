"""`hexijax profile`: measure this machine's devices and links into a profile file.

    arguments -> experiment, cluster, devices -> pieces, one by one -> profile.toml

What was measured is in the file at once, so a call that ends early, by its budget, by
Ctrl-C or by a fault, costs nothing: the next one measures what is missing.
"""

import argparse
import datetime
import gc
import importlib.metadata
import time
from collections.abc import Mapping, Sequence

from hexijax.cli.beginning import check_gpu
from hexijax.cli.screen import Searching
from hexijax.cli.session import open_session
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.job.intake import trace_chain
from hexijax.job.measuring import Bench, Piece, no_memory, usual_sizes
from hexijax.job.profile_file import Facts, ProfileFile


def profile(arguments: argparse.Namespace) -> int:
    """Measures; returns the exit code."""
    screen = Searching()
    session = open_session(arguments, cpu=arguments.cpu)
    cluster = _part(session.cluster, arguments.node)
    if not arguments.cpu:
        check_gpu()
    if arguments.out.is_file():
        cluster.with_profiles(arguments.out)  # that it is a profile file
    from hexijax.runtime.devices import assign

    devices = assign(cluster)
    on = {
        device.kind: _facts(devices[device.name].device_kind)
        for device in reversed(cluster.devices)
    }
    kinds_of = {
        node.name: [d.kind for d in cluster.devices if d.node == node.name]
        for node in cluster.nodes
    }
    file = ProfileFile.open(arguments.out, on, kinds_of, screen.say)
    today = datetime.date.today().isoformat()
    for kind, facts in on.items():
        if "card" not in file.about(kind):
            file.note(kind, date=today, **facts)
    chain = trace_chain(session.experiment)
    for note in chain.notes:
        screen.say(f"note: {note}")
    bench = Bench(
        experiment=session.experiment,
        chain=chain,
        cluster=cluster,
        devices=devices,
        file=file,
        source={kind: _source(cluster, kind, on[kind], today) for kind in on},
        sizes=tuple(arguments.sizes or usual_sizes(session.experiment)),
    )
    left = _measure(bench.pieces(), arguments.seconds, screen)
    _conclude(arguments, left, own_plan=bool(session.experiment.plan))
    return 0


def _measure(pieces: Sequence[Piece], budget_s: float, screen: Searching) -> int:
    """Measures what is missing; returns how many pieces are left."""
    import jax

    began = time.monotonic()
    there = sum(piece.done() for piece in pieces)
    if there:
        screen.say(f"{there} of {len(pieces)} measurements are in the file already")
    for piece in pieces:
        spent_s = time.monotonic() - began
        if spent_s >= budget_s:
            break
        if piece.done():
            continue
        try:
            with screen.on(piece.what):
                found = piece.measure()
        except UserError as error:
            found = f"not measured: {error}"
        except jax.errors.JaxRuntimeError as error:
            if not no_memory(error):
                raise
            found = f"not measured: {str(error).splitlines()[0]}"
        gc.collect()
        spent_s = time.monotonic() - began
        screen.say(f"[{spent_s:4.0f} s of {budget_s:.0f}] {piece.what}: {found}")
    return sum(not piece.done() for piece in pieces)


def _conclude(arguments: argparse.Namespace, left: int, *, own_plan: bool) -> None:
    """What is there now, and what to do with it; ``own_plan``: the experiment has one,
    which may use what is missing."""
    print(f"{arguments.out} holds what was measured. Plans use it with")
    print(f"    hexijax plan {arguments.experiment} --profile {arguments.out}")
    print(
        f'or by a line in the cluster file: profile = "{arguments.out}" (a path from '
        "that file's folder)"
    )
    if left:
        print(
            f"{left} measurements are missing; the same command again goes on, for "
            f"--seconds {arguments.seconds:g}. Tensor degrees without times are left "
            "out of plans."
        )
        if own_plan:
            print(
                "The experiment's own plan is refused where it needs one of those: "
                "--set plan= has the planner make another."
            )


def _part(cluster: Cluster, node: str | None) -> Cluster:
    """The whole cluster, or one node of it."""
    if node is None:
        return cluster
    others = [each.name for each in cluster.nodes if each is not cluster.node(node)]
    return cluster.without(*others) if others else cluster


def _facts(card: str) -> Facts:
    """What figures depend on."""
    from hexijax.cli.doctor import gpus_present

    driver = next((gpu.driver for gpu in gpus_present() if gpu.driver), None)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {"card": card, **({"driver": driver} if driver else {}), **versions}


def _source(cluster: Cluster, kind: str, on: Mapping[str, str], today: str) -> str:
    """Where a kind's figures come from."""
    rest = next(p.source for p in cluster.profiles if p.kind == kind)
    rest = rest.partition("; else ")[2] or rest
    driver = f", driver {on['driver']}" if "driver" in on else ""
    return (
        f"layers measured on {on['card']}{driver}, JAX {on['jax']}, {today}; "
        f"else {rest}"
    )
