"""Is this machine set up to train, and if not, what one line mends it?

    device files, nvidia-smi -> gpus_present -> missing_gpu_message -> run, doctor
    versions, devices, memory ----------------------------------------> doctor

JAX trains on the CPU, hundreds of times slower and with a mere warning, when the build
for the installed card is missing. So `run` and `doctor` stop there, unless told --cpu.
"""

import dataclasses
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

import hexijax
from hexijax.costs.hosts import LIMIT_BYTES, LIMIT_VARIABLE

if TYPE_CHECKING:
    import jax

_PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint"),
    *("ortools", "grain", "numpy"),
)

# From JAX's installation page: what its CUDA builds ask of card and driver.
_CUDA12_CAPABILITY, _CUDA12_DRIVER = (5, 2), 525
_CUDA13_CAPABILITY, _CUDA13_DRIVER = (7, 5), 580


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU the operating system sees, whether or not JAX does."""

    vendor: str
    """``nvidia`` or ``amd``."""

    name: str
    """The model as the driver calls it."""

    compute_capability: tuple[int, int] | None = None
    """NVIDIA's generation number, (7, 0) for Volta; None if nobody could say."""

    driver: str | None = None
    """The driver's version; None if nobody could say."""


def gpus_present(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The GPUs of this machine, without asking JAX; NVIDIA's first.

    Args:
        root: where /dev and /sys are looked for.
    """
    nvidia = tuple(_ask_nvidia_smi())
    if not nvidia and (root / "dev/nvidia0").exists():
        nvidia = (Gpu(vendor="nvidia", name="NVIDIA GPU (nvidia-smi does not answer)"),)
    return (*nvidia, *_amd_gpus(root))


def missing_gpu_message() -> str | None:
    """What to tell a user whose GPU JAX cannot see; None where nothing is amiss.

    A GPU that JAX_PLATFORMS or CUDA_VISIBLE_DEVICES hides is not missed.
    """
    gpus = gpus_present()
    if not gpus or _hidden(os.environ):
        return None
    import jax

    try:
        if any(device.platform == "gpu" for device in jax.devices()):
            return None
    except RuntimeError:
        pass  # no backend at all: the GPU's neither
    names = Counter(gpu.name for gpu in gpus)
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    return (
        f"This machine has {found}, but JAX sees only the CPU. {_remedy(gpus)}\n"
        "To go on without it: --cpu"
    )


def cuda_extra(cards: list[Gpu]) -> str:
    """The JAX extra that runs every one of ``cards``: ``cuda13`` or ``cuda12``.

    CUDA 13 has dropped Volta and Pascal, and needs a recent driver. Where card or
    driver is unknown CUDA 12 is the answer: it runs on all of them.
    """
    driver = _driver_major(cards)
    if driver is None or driver < _CUDA13_DRIVER:
        return "cuda12"
    known = all(card.compute_capability for card in cards)
    new_enough = all(_at_least(card, _CUDA13_CAPABILITY) for card in cards)
    return "cuda13" if known and new_enough else "cuda12"


def doctor(cpu: bool = False) -> int:
    """Prints versions, devices and memory, then what is wrong; 0 if nothing is, else 2.

    Args:
        cpu: do without GPUs, and do not complain about them.
    """
    problems = [f"{name} is not installed." for name in _missing_packages()]
    if not problems and not cpu and (message := missing_gpu_message()):
        problems.append(message)
    rows = [*_software_rows(), ("host", _host())]
    if not problems:
        rows += _device_rows(cpu)
    _print_rows(rows)
    for problem in problems:
        print(f"\n{problem}")
    return 2 if problems else 0


def _ask_nvidia_smi() -> Iterator[Gpu]:
    """One GPU for each line of ``compute_cap, driver_version, name``."""
    if shutil.which("nvidia-smi") is None:
        return
    query = "--query-gpu=compute_cap,driver_version,name"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return
    if answer.returncode != 0:
        return
    for line in answer.stdout.splitlines():
        fields = [field.strip() for field in line.split(",", 2)]
        if len(fields) == 3:
            capability, driver, name = fields
            yield Gpu(
                vendor="nvidia",
                name=name,
                compute_capability=_parse_capability(capability),
                driver=driver if driver[:1].isdigit() else None,
            )


def _parse_capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    if major.isdigit() and minor.isdigit():
        return int(major), int(minor)
    return None  # old drivers answer "[N/A]"


def _amd_gpus(root: Path) -> Iterator[Gpu]:
    """The nodes of the kernel's compute topology that are GPUs; the others are CPUs."""
    if not (root / "dev/kfd").exists():
        return
    for node in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        try:
            pairs = (line.split() for line in node.read_text().splitlines())
        except OSError:  # a node that a container may not read is not ours
            continue
        properties = dict(pair for pair in pairs if len(pair) == 2)
        version = int(properties.get("gfx_target_version", "0"))
        if version:  # 90010 is major 9, minor 0, stepping 10: gfx90a
            major_minor, stepping = divmod(version, 100)
            major, minor = divmod(major_minor, 100)
            yield Gpu(vendor="amd", name=f"AMD GPU (gfx{major}{minor:x}{stepping:x})")


def _hidden(environ: Mapping[str, str]) -> bool:
    """Whether the user has told JAX or CUDA to leave the GPUs alone."""
    platforms = {name for name in environ.get("JAX_PLATFORMS", "").split(",") if name}
    if platforms and platforms.isdisjoint({"gpu", "cuda", "rocm"}):
        return True
    return environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def _remedy(gpus: tuple[Gpu, ...]) -> str:
    """The line that makes JAX see ``gpus``, or why no line can."""
    cards = [gpu for gpu in gpus if gpu.vendor == "nvidia"]
    if not cards:
        return f"Install JAX's ROCm build (it needs ROCm 7):\n    {_pip('rocm7-local')}"
    too_old = [card for card in cards if not _at_least(card, _CUDA12_CAPABILITY)]
    if too_old:
        return (
            f"JAX has no build for {too_old[0].name}: its compute capability is "
            f"{_dotted(too_old[0].compute_capability)}, JAX needs "
            f"{_dotted(_CUDA12_CAPABILITY)} or more."
        )
    driver = _driver_major(cards)
    if driver is not None and driver < _CUDA12_DRIVER:
        return (
            f"Its driver, {cards[0].driver}, is too old for every CUDA build of JAX: "
            f"update it to {_CUDA12_DRIVER} or newer, then run hexijax doctor again."
        )
    extra = cuda_extra(cards)
    plugin = f"jax-{extra}-plugin"
    other = "jax-cuda12-plugin" if extra == "cuda13" else "jax-cuda13-plugin"
    if _version(other):
        return (
            f"The installed {other} does not fit the cards. Replace it:\n"
            f"    {_python()} -m pip uninstall -y {other} {other[:-6]}pjrt && "
            f"{_pip(extra)}"
        )
    if _version(plugin) is not None and _version(plugin) == _version("jaxlib"):
        return (
            f"{plugin} {_version(plugin)} is installed but did not start. See why:\n"
            f"    {_python()} -c 'import jax; jax.devices(\"cuda\")'"
        )
    return f"Install JAX's CUDA build for it:\n    {_pip(extra)}"


def _at_least(card: Gpu, capability: tuple[int, int]) -> bool:
    """Whether ``card`` has this compute capability; an unknown one passes."""
    return card.compute_capability is None or card.compute_capability >= capability


def _driver_major(cards: list[Gpu]) -> int | None:
    """580 for driver 580.95.05; one driver serves all cards of a machine."""
    driver = cards[0].driver
    return int(driver.split(".")[0]) if driver else None


def _dotted(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else ".".join(map(str, capability))


def _pip(extra: str) -> str:
    """Installs ``extra`` for the JAX that is there, into the Python that runs this."""
    return f"{_python()} -m pip install 'jax[{extra}]=={_version('jax')}'"


def _python() -> str:
    return shlex.quote(sys.executable)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing_packages() -> list[str]:
    return [package for package in _PACKAGES if _version(package) is None]


def _software_rows() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "hexijax", hexijax.__version__
    for package in _PACKAGES:
        yield package, _version(package) or "missing"
    ssh = "ssh is there" if shutil.which("ssh") else "no ssh (launch --ssh needs it)"
    ray = _version("ray")
    with_ray = f"ray {ray}" if ray else "no ray (launch --ray needs it)"
    yield "launch", f"{ssh}, {with_ray}"


def _host() -> str:
    return f"{_host_cores()} cores, {_gib(_host_memory_bytes())} memory"


def _host_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_memory_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """The machine's memory, or the container's share of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(limit.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return total


def _device_rows(cpu: bool) -> Iterator[tuple[str, str]]:
    import jax

    if cpu:
        jax.config.update("jax_platforms", "cpu")
    devices = jax.local_devices()
    for (kind, memory), count in Counter(map(_kind_and_memory, devices)).items():
        yield "devices", f"{count} x {kind}, {memory}"

    kinds = sorted({m.kind for d in devices for m in d.addressable_memories()})
    lack = "" if "pinned_host" in kinds else " (no pinned_host: no offload to the host)"
    yield "memory kinds", ", ".join(kinds) + lack
    if devices[0].platform == "gpu" and (hint := _pinned_limit_hint()):
        yield "pinned memory", hint


def _kind_and_memory(device: "jax.Device") -> tuple[str, str]:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return device.device_kind, _gib(limit) if limit else "the host's memory"


def _pinned_limit_hint() -> str | None:
    """How to pin more host memory, where there is more than XLA pins by itself."""
    if LIMIT_VARIABLE in os.environ:
        return f"at most {os.environ[LIMIT_VARIABLE]} GB"
    if _host_memory_bytes() <= LIMIT_BYTES:
        return None
    return (
        f"at most {_gib(LIMIT_BYTES)} of the host's "
        f"{_gib(_host_memory_bytes())}; set {LIMIT_VARIABLE} for more"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _print_rows(rows: list[tuple[str, str]]) -> None:
    """A table for eyes; for pipes one unwrapped line a row."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        for label, text in rows:
            print(f"{label:<17} {text}")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for label, text in rows:
        table.add_row(label, text)
    console.print(table)
