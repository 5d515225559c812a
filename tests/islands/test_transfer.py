"""Arrays between processes: whole, where they were wanted, in time or not at all."""

import re
import signal
import socket
from pathlib import Path

import pytest

from hexijax.errors import UserError
from hexijax.islands.transfer import start_server
from tests.islands.processes import islands


def test_arrays_come_whole_and_who_is_silent_or_gone_is_named(tmp_path: Path):
    with islands(3, tmp_path) as running:
        for seed in (0, 100):
            came = running.all(do="swap", seed=seed)
        for said in came.values():
            assert len(said["came"]) == 2
            assert min(said["came"].values()) > 2 * 12 * 2**20
        slow = running.all(do="swap", seed=200, bytes_per_s=20e6)
        for said in slow.values():  # each direction has the rate
            assert said["s"] > max(said["came"].values()) / 20e6
        running.send("n2", signal.SIGSTOP)
        running.tell(do="lost", peer="n2", pull_s=3)
        for name in ("n0", "n1"):
            said = running.hear(name)
            assert re.match(
                r"Island 'n2' is lost: recv act did not come within 3.0 s\.",
                said["error"],
            )
        running.send("n2", signal.SIGKILL)
        running.workers["n2"].wait()
        running.tell_some(["n0", "n1"], do="lost", peer="n2", pull_s=90)
        for name in ("n0", "n1"):
            said = running.hear(name)
            assert "Island 'n2' is lost: recv act will not come" in said["error"]
            assert re.search(r"Connection closed|recv\(\) failed", said["error"])
            assert said["spent_s"] < 60  # as soon as it is known


@pytest.mark.usefixtures("backend")
def test_a_port_that_someone_has_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"was to listen at '{address}', and can"):
            start_server(address)
    for address in ("nonsense", "127.0.0.1:99999", "192.0.2.1:0"):
        with pytest.raises(UserError, match=f"was to listen at '{address}', and can"):
            start_server(address)
