"""Hygiene for every test: strict dtypes and ranks, eight faked CPU devices, data paths."""

import os

# Before the first import of jax: sharding tests need more than one device.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import logging
import pathlib
import shutil
import signal
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from paged.models.demo import fetch_demo_model
from paged.native.library import load_library
from paged.scheduler.config import DEFAULT_NATIVE_CACHE_DIR

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# How long an example takes is a fact about the machine and what else it does, not about the code.
# In CI the examples are the same in every run: what fails there fails for what was changed.
hypothesis.settings.register_profile(
    "paged",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("paged")


def pytest_configure(config: pytest.Config) -> None:
    """Choose what Triton kernels are for in this process, compiled or interpreted; heed Ctrl-C.

    Triton asks its environment when it is imported, and the answer holds for the whole process.
    """
    # A job in the background ignores it, and so would the commands that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr == "aot":
        # JAX's CUDA plugin is installed without the libraries that only a GPU needs.
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    else:
        os.environ["TRITON_INTERPRET"] = "1"


DATA = pathlib.Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _log_level_is_each_tests_own() -> Iterator[None]:
    """Undo what a command that was run in this process has done to the level of our log."""
    logger = logging.getLogger("paged")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """Folder of golden data."""
    return DATA


@pytest.fixture(scope="session")
def demo_model_path() -> pathlib.Path:
    """GGUF file of the demo model, downloaded on first use."""
    return fetch_demo_model(cache_dir=os.environ.get("PAGED_MODELS_CACHE"))


@pytest.fixture(scope="session")
def native() -> None:
    """The native CPU kernels, loaded; built if nobody has, as it takes a minute.

    Their folder is that of engines and commands: its names are digests of all that goes into them,
    and processes that want them at once wait for the first.
    """
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("missing tool: g++")
    assert load_library(DEFAULT_NATIVE_CACHE_DIR) is None


def _fail_if_tool_is_missing(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip whose reason starts with "missing tool" into a failure where CI=true.

    A developer may lack a tool; CI installs everything (`.ci/run`), so a skip there hides a test.
    """
    if os.environ.get("CI") == "true" and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith("missing tool"):
            report.outcome = "failed"
            report.longrepr = f"{reason}: .ci/run must install it, a skip is not allowed in CI"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    _fail_if_tool_is_missing(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    _fail_if_tool_is_missing(report)
    return report
