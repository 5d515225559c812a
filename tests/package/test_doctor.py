"""The doctor finds a card JAX cannot see, and its one line is the right one."""

import importlib.metadata
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hexijax.cli import doctor
from hexijax.cli.doctor import Gpu, cuda_extra, gpus_present, missing_gpu_message

JAX_VERSION = importlib.metadata.version("jax")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a stand-in nvidia-smi on the path; call it with what it shall print."""

    def install(*lines: str, exit_code: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        body = "\n".join(lines)
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{body}\nEND\nexit {exit_code}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    for variable in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return install


@pytest.fixture
def machine(tmp_path):
    """An empty machine: no device files, no /sys."""
    return tmp_path / "machine"


def _nvidia(capability: tuple[int, int] | None, driver: str | None) -> Gpu:
    return Gpu(
        vendor="nvidia", name="a card", compute_capability=capability, driver=driver
    )


@pytest.mark.parametrize(
    ("card", "extra"),
    [
        ("6.1, 580.95.05, Tesla P40", "cuda12"),
        ("7.0, 580.95.05, Tesla V100-SXM2-32GB", "cuda12"),
        ("7.5, 580.95.05, NVIDIA GeForce RTX 2080 Ti", "cuda13"),
        ("9.0, 580.95.05, NVIDIA H100 80GB HBM3", "cuda13"),
        ("12.0, 590.10, NVIDIA GeForce RTX 5090", "cuda13"),
        ("9.0, 550.54.14, NVIDIA H100 80GB HBM3", "cuda12"),
        ("[N/A], 530.30.02, NVIDIA GeForce RTX 3090", "cuda12"),
    ],
)
def test_an_unseen_card_gets_the_line_that_serves_it(nvidia_smi, card, extra):
    nvidia_smi(card)
    name = card.split(", ")[2]
    assert missing_gpu_message() == (
        f"This machine has 1 x {name}, but JAX sees only the CPU. "
        "Install JAX's CUDA build for it:\n"
        f"    {sys.executable} -m pip install 'jax[{extra}]=={JAX_VERSION}'\n"
        "To go on without it: --cpu"
    )


def test_unlike_cards_get_the_build_that_runs_on_all(nvidia_smi):
    h100, v100 = "9.0, 580.95.05, NVIDIA H100", "7.0, 580.95.05, Tesla V100"
    nvidia_smi(h100, v100, v100)
    message = missing_gpu_message()
    assert "This machine has 1 x NVIDIA H100, 2 x Tesla V100, but" in message
    assert "jax[cuda12]" in message


@pytest.mark.parametrize(
    ("capability", "driver", "extra"),
    [
        ((7, 5), "580.1", "cuda13"),
        ((7, 5), "579.9", "cuda12"),
        ((7, 2), "580.1", "cuda12"),
        (None, "580.1", "cuda12"),
        ((7, 5), None, "cuda12"),
    ],
)
def test_cuda_13_needs_a_turing_and_a_driver_known_to_be_new(capability, driver, extra):
    assert cuda_extra([_nvidia(capability, driver)]) == extra


def test_a_card_or_driver_too_old_for_jax_gets_the_reason_and_no_line(nvidia_smi):
    nvidia_smi("3.7, 470.82, Tesla K80")
    message = missing_gpu_message()
    assert "compute capability is 3.7, JAX needs 5.2" in message
    assert "pip install" not in message

    nvidia_smi("7.0, 470.82, Tesla V100")
    message = missing_gpu_message()
    assert "driver, 470.82, is too old" in message
    assert "525 or newer" in message
    assert "pip install" not in message


def test_a_plugin_that_does_not_fit_is_replaced(nvidia_smi, monkeypatch):
    installed = {"jax": "0.12.0", "jaxlib": "0.12.0", "jax-cuda13-plugin": "0.12.0"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    nvidia_smi("7.0, 580.95.05, Tesla V100")
    message = missing_gpu_message()
    assert "pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt && " in message
    assert "pip install 'jax[cuda12]==0.12.0'" in message


def test_a_plugin_that_fits_but_does_not_start_is_questioned(nvidia_smi, monkeypatch):
    installed = {"jax": "0.12.0", "jaxlib": "0.12.0", "jax-cuda13-plugin": "0.12.0"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    nvidia_smi("9.0, 580.95.05, NVIDIA H100")
    message = missing_gpu_message()
    assert "jax-cuda13-plugin 0.12.0 is installed but did not start" in message
    assert "-c 'import jax; jax.devices(\"cuda\")'" in message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_PLATFORMS", "cpu"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
    ],
)
def test_a_card_the_user_hid_is_not_missed(nvidia_smi, monkeypatch, variable, value):
    nvidia_smi("9.0, 580.95.05, NVIDIA H100")
    monkeypatch.setenv(variable, value)
    assert missing_gpu_message() is None


def test_no_card_no_message(nvidia_smi, machine):
    nvidia_smi("No devices were found", exit_code=6)
    assert gpus_present(machine) == ()


def test_a_card_without_nvidia_smi_is_still_seen(nvidia_smi, machine):
    nvidia_smi("couldn't communicate with the NVIDIA driver", exit_code=9)
    (machine / "dev").mkdir(parents=True)
    (machine / "dev/nvidia0").touch()
    (card,) = gpus_present(machine)
    assert card.vendor == "nvidia"
    assert cuda_extra([card]) == "cuda12"


def test_amd_cards_are_read_from_the_kernels_topology(nvidia_smi, machine, monkeypatch):
    nvidia_smi(exit_code=1)
    nodes = machine / "sys/class/kfd/kfd/topology/nodes"
    for node, version in enumerate([0, 90010, 90402]):
        (nodes / str(node)).mkdir(parents=True)
        properties = f"cpu_cores_count 0\ngfx_target_version {version}\n"
        (nodes / str(node) / "properties").write_text(properties)
    (machine / "dev").mkdir()
    (machine / "dev/kfd").touch()
    cards = gpus_present(machine)
    assert [c.name for c in cards] == ["AMD GPU (gfx90a)", "AMD GPU (gfx942)"]

    monkeypatch.setattr(doctor, "gpus_present", lambda: cards)
    assert f"pip install 'jax[rocm7-local]=={JAX_VERSION}'" in missing_gpu_message()


def test_doctor_prints_what_is_there(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "gpus_present", tuple)
    assert doctor.doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:17].strip(): line[18:] for line in lines}
    assert rows["jax"] == JAX_VERSION
    assert rows["devices"] == "8 x cpu, the host's memory"
    assert rows["memory kinds"] == "device, pinned_host, unpinned_host"
    assert "cores" in rows["host"]


def test_doctor_stops_at_an_unseen_card_unless_told_cpu(nvidia_smi, capsys):
    nvidia_smi("7.0, 580.95.05, Tesla V100")
    assert doctor.doctor() == 2
    assert "jax[cuda12]" in capsys.readouterr().out
    assert doctor.doctor(cpu=True) == 0
    assert "pip install" not in capsys.readouterr().out


def test_doctor_names_packages_that_are_missing(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_missing_packages", lambda: ["ortools"])
    assert doctor.doctor(cpu=True) == 2
    assert "ortools is not installed." in capsys.readouterr().out


def test_the_containers_memory_limit_counts(tmp_path):
    limit = tmp_path / "memory.max"
    unlimited = doctor._host_memory_bytes(limit)
    limit.write_text("max\n")
    assert doctor._host_memory_bytes(limit) == unlimited
    limit.write_text("1073741824\n")
    assert doctor._host_memory_bytes(limit) == 2**30


def test_the_pinned_limit_is_told_only_where_it_binds(monkeypatch):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    monkeypatch.setattr(doctor, "_host_memory_bytes", lambda: 32 * 2**30)
    assert doctor._pinned_limit_hint() is None
    monkeypatch.setattr(doctor, "_host_memory_bytes", lambda: 128 * 2**30)
    assert doctor._pinned_limit_hint() == (
        "at most 64.0 GiB of the host's 128.0 GiB; "
        "set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB for more"
    )


def test_asking_for_cards_imports_no_jax():
    program = (
        "import sys; from hexijax.cli.doctor import gpus_present; gpus_present(); "
        "sys.exit('jax' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root).returncode == 0
