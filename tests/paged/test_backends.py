"""Which backend serves a call, and what memory the device has."""

import pathlib

import jax
import pytest

from paged.backends import (
    Backend,
    DeviceMemory,
    compiling_for,
    current_device,
    current_platform,
    device_memory,
    host_memory,
    resolve_backend,
)
from paged.native import library

KIB = 1024

# Backends that do not exist: what resolves them is not what the project happens to have today.
BACKENDS = {
    "wood": Backend(platforms=("gpu",)),
    "stone": Backend(missing=lambda: "no chisel was found"),
    "xla": Backend(),
}
PREFERENCE = {"gpu": ("stone", "wood"), "cpu": ("stone",)}


def resolve(requested: str, platform: str) -> str:
    return resolve_backend(requested, platform, backends=BACKENDS, preference=PREFERENCE)


@pytest.mark.parametrize(("platform", "name"), [("gpu", "wood"), ("cpu", "xla"), ("tpu", "xla")])
def test_auto_takes_the_first_available_and_ends_at_xla(platform: str, name: str):
    assert resolve("auto", platform) == name


def test_auto_passes_over_what_cannot_serve_the_call():
    def unsupported(name: str) -> str | None:
        return "it floats" if name == "wood" else None

    options = {"unsupported": unsupported, "backends": BACKENDS, "preference": PREFERENCE}
    assert resolve_backend("auto", "gpu", **options) == "xla"
    with pytest.raises(NotImplementedError, match="'wood' does not support this call: it floats; "):
        resolve_backend("wood", "gpu", **options)


def test_explicit_name_is_kept():
    assert resolve("wood", "gpu") == "wood"
    assert resolve("xla", "gpu") == "xla"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="backend='straw' is unknown; choose one of auto, wood, stone, xla"
    ):
        resolve("straw", "cpu")


def test_promise_that_cannot_be_kept_says_why():
    with pytest.raises(NotImplementedError, match="'wood' is unavailable: it runs on gpu, not on"):
        resolve("wood", "cpu")
    with pytest.raises(NotImplementedError, match="'stone' is unavailable: no chisel was found"):
        resolve("stone", "gpu")


def test_kernels_that_are_not_loaded_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(library, "_loaded", None)
    assert resolve_backend("auto", "cpu") == "xla"
    with pytest.raises(NotImplementedError, match=r"'native' is unavailable: .*load_library\(\)"):
        resolve_backend("native", "cpu")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_project_serves_every_platform(platform: str):
    assert resolve_backend("xla", platform) == "xla"
    assert resolve_backend("auto", platform)


def test_platform_here_is_cpu():
    assert current_platform() == "cpu"


def test_target_stands_for_the_device_while_programs_are_traced_for_it():
    target = FakeDevice(None)
    with compiling_for(target):
        assert current_device() is target
        assert current_platform() == "gpu"
    assert current_platform() == "cpu"


def test_traces_for_one_target_do_not_serve_another():
    traced = []

    @jax.jit
    def layer(x):
        traced.append(current_platform())
        return x

    for target in (FakeDevice(None), jax.devices("cpu")[0]):
        with compiling_for(target):
            jax.eval_shape(layer, 1.0)
    assert traced == ["gpu", "cpu"]


class FakeDevice:
    """An accelerator that reports what it is told to."""

    platform = "gpu"

    def __init__(self, stats: dict[str, int] | None) -> None:
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats

    def __str__(self) -> str:
        return "cuda:7"


def test_accelerator_reports_its_pool():
    stats = {"bytes_limit": 1000, "bytes_in_use": 300, "peak_bytes_in_use": 900}
    assert device_memory(FakeDevice(stats)) == DeviceMemory(1000, 700)


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 3}])
def test_silent_accelerator_is_an_error(stats: dict[str, int] | None):
    with pytest.raises(RuntimeError, match="cuda:7 reports no memory statistics; set kv_cache_mem"):
        device_memory(FakeDevice(stats))


def test_cpu_reports_the_host():
    memory = device_memory(jax.devices("cpu")[0])
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert device_memory().total_bytes == memory.total_bytes


def write_files(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  6000 kB\n"}
CGROUP = "sys/fs/cgroup"


def test_host_without_a_container_has_what_meminfo_says(tmp_path: pathlib.Path):
    write_files(tmp_path, MEMINFO)
    assert host_memory(tmp_path) == DeviceMemory(8000 * KIB, 6000 * KIB)


def test_host_without_meminfo_has_all_physical_memory(tmp_path: pathlib.Path):
    memory = host_memory(tmp_path)
    assert memory.free_bytes == memory.total_bytes > 0


@pytest.mark.parametrize(
    "files",
    [
        {
            f"{CGROUP}/memory.max": f"{4000 * KIB}\n",
            f"{CGROUP}/memory.current": f"{1500 * KIB}\n",
            f"{CGROUP}/memory.stat": f"anon 7\ninactive_file {500 * KIB}\n",
        },
        {
            f"{CGROUP}/memory/memory.limit_in_bytes": f"{4000 * KIB}\n",
            f"{CGROUP}/memory/memory.usage_in_bytes": f"{1500 * KIB}\n",
            f"{CGROUP}/memory/memory.stat": f"rss 7\ntotal_inactive_file {500 * KIB}\n",
        },
    ],
    ids=["v2", "v1"],
)
def test_container_has_its_limit_less_use_without_page_cache(
    files: dict[str, str], tmp_path: pathlib.Path
):
    write_files(tmp_path, MEMINFO | files)
    assert host_memory(tmp_path) == DeviceMemory(4000 * KIB, 3000 * KIB)


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_container_without_a_limit_has_the_host(limit: str, tmp_path: pathlib.Path):
    files = {f"{CGROUP}/memory.max": limit, f"{CGROUP}/memory.current": "1024"}
    write_files(tmp_path, MEMINFO | files)
    assert host_memory(tmp_path) == DeviceMemory(8000 * KIB, 6000 * KIB)


def test_container_that_uses_all_has_nothing_free(tmp_path: pathlib.Path):
    files = {f"{CGROUP}/memory.max": "1000", f"{CGROUP}/memory.current": "2000"}
    write_files(tmp_path, MEMINFO | files)
    assert host_memory(tmp_path) == DeviceMemory(1000, 0)


def test_memory_of_an_absent_device_is_what_was_said():
    absent = jax.devices()[-1]
    with compiling_for(absent, memory_bytes=5):
        assert current_device() is absent
        assert device_memory() == DeviceMemory(5, 5)
        assert device_memory(absent).total_bytes > 5
    with compiling_for(absent):
        assert device_memory().total_bytes > 5
