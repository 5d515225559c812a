"""Islands as Ray actors: Ray places them, starts them, and notices when a node goes.

    connect(address); RayIsland(name, words, needs) -> poll, kill: as a process here

An actor holds an island's process and nothing else: JAX is not in it, and the island
ends with it. Ray's own connections are inside the circle of trust: whoever reaches its
ports can run code. Needs the extra `ray`.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hexijax.errors import UserError

SHARE = 0.001
"""Of a node's own resource: it says where, not how much."""

_ACCELERATORS = ("B200", "H200", "H100", "A100", "L40S", "L4", "V100", "T4", "P100")


def connect(address: str) -> str:
    """Joins a Ray cluster as a driver; this machine's address in it.

    Raises:
      UserError: Ray is not installed, or nobody is there.
    """
    ray = _ray()
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=True, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"--ray {address}: no Ray cluster is there ({error}). `ray status` "
                "says what its address is; auto finds the one of this machine."
            ) from error
    return str(ray.util.get_node_ip_address())


def needs(
    island: str, kinds: Sequence[str], resources: Mapping[str, float]
) -> dict[str, Any]:
    """What an island's actor asks of a node.

    Args:
      island: its name; a node that has a resource so called takes it.
      kinds: of its cards, as the catalog calls them; CPU devices not among them.
      resources: of the whole Ray cluster.

    Raises:
      UserError: no node can have what it asks for.
    """
    if island in resources:
        cards = {"num_gpus": len(kinds)} if kinds else {}  # of none asked for it sees
        return {"num_cpus": 0, "resources": {island: SHARE}, **cards}  # none
    if not kinds:
        return {"num_cpus": 1}
    asked: dict[str, Any] = {"num_cpus": 0, "num_gpus": len(kinds)}
    for word in _ACCELERATORS:
        if all(word.lower() in kind.split("-")[0] for kind in kinds):
            if f"accelerator_type:{word}" in resources:
                asked["accelerator_type"] = word
            break
    if resources.get("GPU", 0) < len(kinds):
        raise UserError(
            f"--ray: island {island!r} needs {len(kinds)} GPUs and the Ray cluster has "
            f"{resources.get('GPU', 0):g}. Start its node with `ray start --resources "
            f"'{{\"{island}\": 1}}'` to name it, or correct the cluster file."
        )
    return asked


def resources() -> dict[str, float]:
    """Of the Ray cluster joined."""
    return dict(_ray().cluster_resources())


class RayIsland:
    """An island in an actor."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        *,
        asks: Mapping[str, Any],
        environ: Mapping[str, str],
        log: Path,
        shown: bool,
    ):
        """
        Args:
          name: of the island.
          words: of its command.
          asks: what ``needs`` says.
          environ: beside that of the node.
          log: on the node, takes its lines.
          shown: Ray shows its lines here, too.
        """
        self._ray, self._log, self._ended = _ray(), log, ""
        self._code: int | None = None
        actor = self._ray.remote(max_restarts=0, max_task_retries=0, **asks)(Holder)
        self._actor = actor.remote()
        self._running = self._actor.run.remote(
            name, list(words), dict(environ), str(log), os.getcwd(), shown
        )

    def poll(self) -> int | None:
        """Its exit code; -9 where its actor died; None: it runs, or waits for room."""
        if self._code is None:
            done, _ = self._ray.wait([self._running], timeout=0)
            if done:
                try:
                    self._code = int(self._ray.get(self._running))
                except self._ray.exceptions.RayError as error:
                    words = (str(error).splitlines() or [type(error).__name__])[0]
                    self._ended, self._code = f"Ray says: {words}", -9
        return self._code

    def ended(self) -> str:
        """How, as far as Ray knows more than an exit code says; else empty."""
        return self._ended

    def signal(self, number: int) -> None:
        """Ray has one way to end an actor."""
        self.kill()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within ``seconds``."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        return self.poll() is not None

    def kill(self) -> None:
        """Ends actor and island at once."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)
        self.wait(10.0)

    def last_lines(self) -> str:
        """The end of its log, where it can be seen from here."""
        if not self._log.is_file():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])


class Holder:
    """The actor's class."""

    def run(
        self,
        name: str,
        words: list[str],
        environ: dict[str, str],
        log: str,
        folder: str,
        shown: bool,
    ) -> int:
        """Runs an island's process to its end; its exit code."""
        from hexijax.islands.processes import Started

        if os.path.isdir(folder):
            os.chdir(folder)

        def tell(island: str, line: str) -> None:
            if shown:
                print(line, flush=True)

        started = Started(name, words, log=Path(log), environ=environ, tell=tell)
        while not started.wait(0.2):
            pass
        code = started.poll()
        assert code is not None
        return code


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "--ray: Ray is not installed. pip install 'hexijax[ray]', here and on "
            "every node."
        ) from error
    return ray
