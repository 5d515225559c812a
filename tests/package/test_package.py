"""What is shipped, and what importing it costs."""

import email
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import hexijax

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "hexijax" / "cli" / "project"
CARDS = ROOT / "hexijax" / "cluster" / "cards"

# Rooms that plan without a device, and so without JAX; and `hexijax run`: JAX reads its
# platform and cache when it is imported. import-linter sees their own imports, this
# sees what their packages drag in.
ROOMS_WITHOUT_JAX = [
    "hexijax",
    "hexijax.cli.run",
    "hexijax.cluster",
    "hexijax.costs",
    "hexijax.data",
    "hexijax.experiment",
    "hexijax.layers.chain",
    "hexijax.plan",
    "hexijax.planner",
    "hexijax.program",
    "hexijax.simulator",
    "hexijax.weights",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_hexijax_only(wheel):
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hexijax", f"hexijax-{hexijax.__version__}.dist-info"}
    assert "hexijax/py.typed" in names
    cards = {f"hexijax/cluster/cards/{path.name}" for path in CARDS.iterdir()}
    assert cards
    assert cards <= {*names}
    templates = {str(p.relative_to(ROOT)) for p in PROJECT.rglob("*.in")}
    assert len(templates) > 5
    assert templates <= {*names}
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_says_what_it_needs_and_is(wheel):
    info = f"hexijax-{hexijax.__version__}.dist-info"
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    extras = set(metadata.get_all("Provides-Extra"))
    assert {"cuda12", "cuda13", "rocm", "tpu", "test", "dev"} <= extras
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "hexijax = hexijax.cli.main:main" in entry_points


def test_accelerator_extras_exist_in_jax():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    offered = set(importlib.metadata.metadata("jax").get_all("Provides-Extra"))
    for ours in ("cuda12", "cuda13", "rocm", "tpu"):
        (requirement,) = extras[ours]
        assert re.fullmatch(r"jax\[(.+)\]", requirement)[1] in offered


@pytest.mark.parametrize("module", ROOMS_WITHOUT_JAX)
def test_planning_imports_no_jax(module):
    heavy = "{'jax', 'flax', 'optax'} & {*sys.modules}"
    program = f"import sys, {module}; sys.exit(', '.join({heavy}) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_that_was_found_elsewhere_needs_no_solver_here():
    """Only the search does: machines with cards may lack one."""
    rooms = "hexijax.job.machine, hexijax.simulator, hexijax.planner.baselines"
    program = f"import sys; sys.modules['ortools'] = None; import {rooms}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_public_names_load_on_first_use_and_stay():
    for name in set(hexijax.__all__) - {"__version__"}:
        assert name in dir(hexijax)
        assert getattr(hexijax, name) is vars(hexijax)[name]


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError) as unknown:
        hexijax.cluter  # noqa: B018
    assert str(unknown.value) == (
        "module 'hexijax' has no attribute 'cluter'. Did you mean 'Cluster'? "
        "Its public names are Cluster, Experiment, Trainer, emulate, load, make_plan, "
        "simulate, trace_chain."
    )
    with pytest.raises(AttributeError, match="attribute 'zzz'. Its public names"):
        hexijax.zzz  # noqa: B018
