"""Settings every test shares; they must stand before JAX opens its backend.

Eight forced CPU devices stand in for every cluster. One persistent compilation cache
serves all tests, and all later runs: a cold program costs 0.3 s, a warm one 0.02 s. It
lies in $HEXIJAX_TEST_CACHE, else in pytest's cache folder. All are set through the
environment, so that subprocesses inherit them.
"""

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest


def _cheap_code() -> list[str]:
    """A flag under which XLA takes half of the time to write code.

    Newer ones lack it, and an older instruction set, as quick, lacks float16.
    """
    if importlib.metadata.version("jaxlib") < "0.11":
        return ["--xla_cpu_use_fusion_emitters=false"]
    return []


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # One thread an operation: eight devices are parallel enough for two cores.
        "--xla_cpu_multi_thread_eigen=false",
        # Programs run once or twice: compiling them takes longer than running them.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        *_cheap_code(),
    ]
).strip()
os.environ.setdefault("NPROC", "2")  # XLA's thread pool, where there are more cores

# Set as this file is imported: a test file may import JAX before any hook of pytest's.
# One cache a worker: a cache entry is not written at once, and readers would see half.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
    os.environ.get("HEXIJAX_TEST_CACHE")
    or str(Path(__file__).parents[1] / ".pytest_cache" / "d" / "jax"),
    os.environ.get("PYTEST_XDIST_WORKER", ""),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# The same examples each time: a failure seen once is seen again. Two shared cores may
# stall for seconds, so no test is judged by its time.
hypothesis.settings.register_profile(
    "hexijax",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("hexijax")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have to say: a worker's own output is not shown."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="session")
def backend() -> None:
    """JAX's backend, open: a command run in this process can force no other devices."""
    import jax

    jax.devices()


@pytest.fixture
def strict_dtypes() -> Iterator[None]:
    """Implicit dtype promotion raises. For our own arithmetic: models may promote."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def strict_ranks() -> Iterator[None]:
    """Implicit rank promotion raises. For our own arithmetic: models may promote."""
    import jax

    with jax.numpy_rank_promotion("raise"):
        yield
