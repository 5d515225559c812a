"""Islands as Ray actors, on a Ray cluster of three nodes of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hexijax.errors import UserError
from hexijax.islands.on_ray import SHARE, needs

ROOT = Path(__file__).parents[2]

JOB = """
import json, os, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from hexijax.islands import on_ray
from hexijax.islands.launcher import Launcher
from hexijax.islands.rendezvous import Rendezvous
from hexijax.islands.wire import TOKEN

names, folder = ("a", "b", "c"), Path(sys.argv[1])
head = {"num_cpus": 1, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = {name: cluster.add_node(num_cpus=1, resources={name: 1}) for name in names}
host = on_ray.connect(cluster.address)
brief = {"steps": 150, "elastic": True}
meeting = Rendezvous(names, run="test", address=f"{host}:0", silence_s=20.0)
meeting.brief(brief)
left = []

def start(name):
    return on_ray.RayIsland(
        name,
        [sys.executable, "-m", "tests.islands.standin", name, meeting.address, "well"],
        asks=on_ray.needs(name, [], {n: 1.0 for n in names}),
        environ={TOKEN: meeting.token, "PYTHONPATH": os.environ["PYTHONPATH"]},
        log=folder / f"{name}.log",
        shown=False,
    )

def remove():
    while not all((folder / f"{n}.log").is_file() and "generation 0" in
                  (folder / f"{n}.log").read_text() for n in names):
        time.sleep(0.1)
    left.append(time.monotonic())
    cluster.remove_node(nodes["b"])

said = []

def say(line):
    said.append([time.monotonic() - left[0] if left else 0.0, line])

threading.Thread(target=remove, daemon=True).start()
replan = lambda islands: (islands, brief)
outcome = Launcher(meeting, start, replan=replan, say=say).run()
ray.shutdown()
cluster.shutdown()
done = {name: words["done"] for name, words in outcome.said.items()}
found = {"code": outcome.code, "lost": outcome.lost, "said": said, "done": done}
print(json.dumps(found))
"""


def test_a_node_that_is_removed_is_noticed_at_once_and_the_others_go_on(tmp_path: Path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, found
    ((name, why),) = found["lost"]
    assert name == "b"
    assert why.startswith(("Ray says: ", "it hung up"))
    after_s, line = found["said"][0]
    assert line.startswith("island b is lost: ")
    assert after_s < 10.0
    assert found["done"] == {"a": 150, "c": 150}


def test_an_island_asks_for_its_node_or_for_its_cards():
    here = {"CPU": 8.0, "GPU": 4.0, "box": 1.0, "accelerator_type:H100": 1.0}
    assert needs("box", ["h100-80g-sxm"], here) == {
        "num_cpus": 0,
        "resources": {"box": SHARE},
        "num_gpus": 1,
    }
    assert "num_gpus" not in needs("box", [], here)
    assert needs("x", ["h100-80g-sxm"] * 2, here) == {
        "num_cpus": 0,
        "num_gpus": 2,
        "accelerator_type": "H100",
    }
    assert needs("x", ["rtx4090-24g"], here) == {"num_cpus": 0, "num_gpus": 1}
    assert needs("x", [], here) == {"num_cpus": 1}
    with pytest.raises(UserError, match="needs 5 GPUs and the Ray cluster has 4"):
        needs("x", ["rtx4090-24g"] * 5, here)
