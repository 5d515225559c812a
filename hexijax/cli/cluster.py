"""`hexijax cluster`: several boxes to one cluster file, and a file held against boxes.

    init --ssh a,b,c: probe each, time the way between each two -> lab.toml
    check lab.toml: the same, beside what the file says

What was measured carries a comment that says so; all else is the catalog's or assumed.
"""

import argparse
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.islands import ssh
from hexijax.islands.wire import TOKEN, new_token

PROBE_S = 180.0
"""For a host to import JAX and to look at its cards."""

Rates = Mapping[tuple[str, str], tuple[float, float, float]]
"""By two hosts: seconds of a small array, bytes a second of a large one, and of one
stream of TCP."""

_SPARE_BYTES = 2**30
"""Of a card's free memory, that a context and loaded kernels take."""


def cluster(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    if arguments.action == "check":
        return _check(arguments)
    if not arguments.ssh:
        raise UserError(
            "cluster init: name the hosts, as --ssh a,b,c. ssh must reach each without "
            "a question, and hexijax must be installed there."
        )
    hosts = [host.strip() for host in arguments.ssh.split(",") if host.strip()]
    probes = {host: _probe(host, arguments) for host in hosts}
    rates = {} if arguments.no_rates else _rates(hosts, arguments)
    name = arguments.output.stem
    text = render(name, probes, rates)
    Cluster.from_toml(text)  # what is written can be read
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(text)
    print(
        f"{arguments.output}: {len(hosts)} hosts. Train on them: hexijax launch --ssh "
        f"{arguments.output} EXPERIMENT"
    )
    return 0


def render(
    name: str,
    probes: Mapping[str, Mapping[str, Any]],
    rates: Rates,
    *,
    today: str | None = None,
) -> str:
    """The cluster file.

    Args:
        name: of the cluster.
        probes: by host, what ``probe.look`` found.
        rates: between hosts.
        today: the date of the measurements.
    """
    day = today or time.strftime("%Y-%m-%d")
    lines = [
        f"# Written by `hexijax cluster init` on {day}. A line that was measured says",
        "# so; kinds come from the catalog (`hexijax catalog`), the rest is assumed.",
        "",
        "format = 1",
        f'name = "{name}"',
    ]
    if any(kind == "cpu" for p in probes.values() for kind, _ in p["kinds"]):
        lines += ["", *_CPU_KIND]
    for host, probe in probes.items():
        lines += ["", *_node(host, probe)]
    lines += ["", "[links]", "# between cards of a host: assumed, PCIe 4 x16"]
    lines += ["in_node = { latency_us = 20, bandwidth_gb_per_s = 20 }"]
    lines += ["# between hosts that were not measured: assumed, 10 Gbit/s"]
    lines += ["between_nodes = { latency_us = 50, bandwidth_gb_per_s = 1.25 }"]
    for host, probe in probes.items():
        for i, j in probe["apart"]:
            lines += ["", "[[links.device_pairs]]"]
            lines += ["# no peer access: copies go through the host's memory"]
            lines += [f'between = ["{_name(host)}/{i}", "{_name(host)}/{j}"]']
            lines += ["link = { latency_us = 30, bandwidth_gb_per_s = 8 }"]
    for (a, b), (latency_s, bytes_per_s, tcp_bytes_per_s) in rates.items():
        lines += ["", "[[links.node_pairs]]"]
        lines += [f'between = ["{_name(a)}", "{_name(b)}"]']
        lines += [
            f"# measured {day}: arrays from device to device, the slower way; one TCP "
            f"stream has {tcp_bytes_per_s / 1e9:.3g} GB/s"
        ]
        figures = f"latency_us = {latency_s * 1e6:.0f}, bandwidth_gb_per_s = "
        lines += [f"link = {{ {figures}{bytes_per_s / 1e9:.3g} }}"]
    return "\n".join(lines) + "\n"


_CPU_KIND = (
    "[kinds.cpu]",
    'vendor = "cpu"',
    "memory_gib = 2",
    "peak_tflops = { float32 = 0.05 }",
    "memory_gb_per_s = 10",
    "host_link_gb_per_s = 10",
    'source = "declared: one forced CPU device"',
)


def _node(host: str, probe: Mapping[str, Any]) -> list[str]:
    versions = probe["versions"]
    lines = [
        "[[nodes]]",
        f"# Python {versions['python']}, JAX {versions['jax']}, hexijax "
        f"{versions['hexijax']}",
        f'name = "{_name(host)}"',
    ]
    if _name(host) != host:
        lines += [f'host = "{host}"']
    groups: list[str] = []
    first = 0
    for kind, count in probe["kinds"]:
        free = probe["free_bytes"][first : first + count]
        first += count
        usable = ""
        if free:
            gib = max(0.5, (min(free) - _SPARE_BYTES) / 2**30)
            usable = f", usable_memory_gib = {gib:.2f}"
        groups += [f'  {{ kind = "{kind}", count = {count}{usable} }},']
    if probe["free_bytes"]:
        lines += ["# usable: measured, what was free less 1 GiB"]
    lines += ["devices = [", *groups, "]", "# measured: what the system reports"]
    lines += [f"host_memory_gib = {probe['host_memory_bytes'] / 2**30:.1f}"]
    return [*lines, f"host_cores = {probe['host_cores']}"]


def _name(host: str) -> str:
    """A node's name for what ssh calls a host."""
    plain = host.rpartition("@")[2]
    kept = "".join(c if c.isalnum() or c in "-_." else "-" for c in plain).lstrip("-_.")
    return kept or "host"


def _probe(host: str, arguments: argparse.Namespace) -> dict[str, Any]:
    print(f"{host}: looking", flush=True)
    words = [arguments.python, "-m", "hexijax.cli.probe"]
    said = ssh.run(host, words, folder=arguments.folder, seconds=PROBE_S)
    return json.loads(said.splitlines()[-1])


def _rates(hosts: Sequence[str], arguments: argparse.Namespace) -> Rates:
    """Both ways between each two hosts; the slower of either counts."""
    found = {}
    for a, b in itertools.combinations(hosts, 2):
        ways = (a, b), (b, a)
        tcp = [_rate(*way, arguments) for way in ways]
        arrays = [_rate(*way, arguments, "arrays") for way in ways]
        found[a, b] = (
            max(x for x, _ in arrays),
            min(y for _, y in arrays),
            min(y for _, y in tcp),
        )
        rates = [f"{each / 1e9:.3g} GB/s" for each in found[a, b][1:]]
        print(f"{a} - {b}: {rates[0]}, one stream of TCP {rates[1]}", flush=True)
    return found


def _rate(
    a: str, b: str, arguments: argparse.Namespace, what: str = "rate"
) -> tuple[float, float]:
    """From ``a`` to ``b``: of the network, or of ``arrays``."""
    probe, token = [arguments.python, "-m", "hexijax.cli.probe"], new_token()
    words = ssh.script(
        [*probe, what, ssh.address_of(a)], folder=arguments.folder, secret=TOKEN
    )
    server = subprocess.Popen(
        [*ssh.SSH, a, words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with server:
        assert server.stdin is not None
        assert server.stdout is not None
        late = threading.Timer(PROBE_S, server.kill)  # then its line is empty
        late.start()
        try:
            server.stdin.write(f"{token}\n")
            server.stdin.flush()
            address = server.stdout.readline().strip()
            if not address:
                raise UserError(
                    f"{a} cannot listen at {ssh.address_of(a)}, by which others reach "
                    f"it, or did not say so within {PROBE_S:g} s. Leave rates out with "
                    "--no-rates, and write them by hand."
                )
            words = [*probe, f"{what}-to", address]
            said = ssh.run(
                b, words, folder=arguments.folder, secret=token, seconds=PROBE_S
            )
        finally:
            late.cancel()
            server.kill()
    latency_s, bytes_per_s = json.loads(said.splitlines()[-1])
    return latency_s, bytes_per_s


def _check(arguments: argparse.Namespace) -> int:
    """Each host of a file beside what it has now; 2 if anything differs."""
    file: Path | None = arguments.file
    if file is None or not file.is_file():
        raise UserError(f"cluster check: there is no cluster file {file}.")
    described, wrong = Cluster.from_toml(file), 0
    versions: dict[str, dict[str, str]] = {}
    for node in described.nodes:
        host = node.host or node.name
        problems: list[str] = []
        try:
            probe = _probe(host, arguments)
        except UserError as error:
            problems = [str(error)]
        else:
            versions[host] = probe["versions"]
            has = dict(map(tuple, probe["kinds"]))
            for group in node.devices:
                found = has.get(group.kind, 0)
                if found < group.count - len(node.absent):
                    problems += [
                        f"the file says {group.count} x {group.kind}, it has "
                        f"{found} ({has})"
                    ]
            if probe["host_memory_bytes"] < 0.9 * node.host_memory_bytes:
                problems += [
                    f"the file says {node.host_memory_bytes / 2**30:.0f} GiB "
                    f"of host memory, it has "
                    f"{probe['host_memory_bytes'] / 2**30:.0f}"
                ]
        wrong += bool(problems)
        for line in problems or ["as the file says"]:
            print(f"{host}: {line}", flush=True)
    unlike = {v["hexijax"] for v in versions.values()}
    if len(unlike) > 1:
        wrong += 1
        print(f"hexijax is not the same everywhere: {', '.join(sorted(unlike))}")
    return 2 if wrong else 0
