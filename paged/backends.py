"""Which implementation an op uses, and how much memory the device has.

The only file that asks what the hardware is. Ops look up their implementation by the name returned
here, and import it only then, so a CPU install never imports a GPU toolchain.
"""

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax

from paged.mosaic.support import why_no_assembler, why_no_gpu
from paged.native import library

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """What a backend needs in order to run.

    Attributes:
      platforms: JAX platform names it runs on; empty means all.
      missing: returns why it cannot run on this machine, or None if it can.
    """

    platforms: tuple[str, ...] = ()
    missing: Callable[[], str | None] = lambda: None

    def unavailable(self, platform: str) -> str | None:
        """Return why the backend cannot run on `platform`, or None if it can."""
        if self.platforms and platform not in self.platforms:
            return f"it runs on {', '.join(self.platforms)}, not on {platform}"
        return self.missing()


class _Target(NamedTuple):
    device: jax.Device
    memory_bytes: int | None


# What programs are traced for, unless that is the device they will run on here.
_TARGET: contextvars.ContextVar[_Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def compiling_for(device: jax.Device, *, memory_bytes: int | None = None) -> Iterator[None]:
    """Have the ops that are traced inside choose as they do on `device`, which may be absent.

    Traces are forgotten before and after, because JAX does not know that they differ by target.

    Args:
      device: the target, or its description.
      memory_bytes: what `device_memory` says inside; None: what it says otherwise.
    """
    token = _TARGET.set(_Target(device, memory_bytes))
    jax.clear_caches()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _TARGET.reset(token)
        jax.clear_caches()  # type: ignore[no-untyped-call]


def current_device() -> jax.Device:
    """Return the device that programs are being traced for: by default the first one here."""
    target = _TARGET.get()
    return jax.local_devices()[0] if target is None else target.device


def current_platform() -> str:
    """Return the name of the platform that programs are being traced for: "cpu", "gpu" or "tpu"."""
    platform: str = current_device().platform
    return platform


def _why_no_triton() -> str | None:
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported; pip install 'paged[cuda12]'"
    capability = getattr(current_device(), "compute_capability", "none")
    major = capability.partition(".")[0]
    if not major.isdecimal() or int(major) < 8:
        return f"it needs an NVIDIA GPU of compute capability 8.0 or more, not {capability}"
    return None


def _why_no_mosaic() -> str | None:
    device = current_device()
    reason = why_no_gpu(getattr(device, "compute_capability", "none"))
    if reason is not None:
        return reason
    try:
        nvcc_version = importlib.metadata.version("nvidia-cuda-nvcc-cu12")
    except importlib.metadata.PackageNotFoundError:
        nvcc_version = None
    client = getattr(device, "client", None)
    found = re.search(r"cuda (\d+)", getattr(client, "platform_version", ""))
    return why_no_assembler(nvcc_version, int(found[1]) if found else None)


# Options of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

BACKENDS: Mapping[str, Backend] = {
    "native": Backend(platforms=("cpu",), missing=library.not_loaded),
    "xla": Backend(),
    "triton": Backend(platforms=("gpu",), missing=_why_no_triton),
    "mosaic": Backend(platforms=("gpu",), missing=_why_no_mosaic),
}
"""Backend name -> what it needs. "xla" needs nothing and supports everything."""

PREFERENCE: Mapping[str, tuple[str, ...]] = {"cpu": ("native",), "gpu": ("triton",)}
"""Platform -> backends that "auto" tries before it ends at "xla", best first."""

FASTEST_ATTENTION: Mapping[str, tuple[str, ...]] = {}
"""Kind of device, as in "NVIDIA H200" -> the same for attention, as measured, before `PREFERENCE`.

No kind has been measured yet. A row needs figures in docs/performance.md, as decision 0010 asks;
`("mosaic", "triton")` is the row to expect for a GPU on which prefill is faster with "mosaic".
"""


def unavailable(name: str) -> str | None:
    """Return why a backend cannot run on the device that programs are traced for, or None."""
    return BACKENDS[name].unavailable(current_platform())


def resolve_backend(
    requested: str,
    platform: str,
    *,
    unsupported: Callable[[str], str | None] = lambda name: None,
    backends: Mapping[str, Backend] = BACKENDS,
    preference: Mapping[str, tuple[str, ...]] = PREFERENCE,
    fastest: Mapping[str, tuple[str, ...]] | None = None,
) -> str:
    """Return the name of the backend to use; never "auto".

    "auto" takes the first that is available and supports the call, of what was measured to be
    fastest on this kind of device, else of the platform's preference, and ends at "xla". Any other
    name is a promise: it is used or an error says why not.

    Args:
      requested: "auto" or a key of `backends`.
      platform: a JAX platform name, see `current_platform`.
      unsupported: returns why a backend, by name, cannot serve the call at hand, or None.
      backends: the known backends.
      preference: order that "auto" follows, by platform.
      fastest: the same by kind of device, which goes first.

    Raises:
      ValueError: if the name is unknown.
      NotImplementedError: if the named backend cannot run here, or cannot serve the call; the
        message gives the reason.
    """
    if requested == "auto":
        kind = getattr(current_device(), "device_kind", "")
        for name in (fastest or {}).get(kind, preference.get(platform, ())):
            reason = backends[name].unavailable(platform) or unsupported(name)
            if reason is None:
                return name
            _log_fallback(name, reason)
        return "xla"
    if requested not in backends:
        known = ", ".join(["auto", *backends])
        raise ValueError(f"backend={requested!r} is unknown; choose one of {known}.")
    reason = backends[requested].unavailable(platform)
    if reason is not None:
        raise NotImplementedError(f"backend={requested!r} is unavailable: {reason}; use 'auto'.")
    reason = unsupported(requested)
    if reason is not None:
        raise NotImplementedError(
            f"backend={requested!r} does not support this call: {reason}; use 'auto'."
        )
    return requested


@functools.cache  # every layer of every program asks
def _log_fallback(name: str, reason: str) -> None:
    logger.info("backend %r is not used: %s.", name, reason)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes.

    Attributes:
      total_bytes: what the device has, or what this process may use of it.
      free_bytes: what nothing uses at the moment.
    """

    total_bytes: int
    free_bytes: int


def device_memory(device: jax.Device | None = None) -> DeviceMemory:
    """Return the total and free memory of a device.

    An accelerator reports JAX's own pool (`bytes_limit` and `bytes_in_use`). A CPU has no pool of
    its own, so there it is the memory of the machine, or of the container if that is less.

    Args:
      device: the device asked about; None is the first one of this process, or the one that is
        being compiled for.

    Raises:
      RuntimeError: if an accelerator does not tell.
    """
    target = _TARGET.get()
    if device is None and target is not None and target.memory_bytes is not None:
        return DeviceMemory(target.memory_bytes, target.memory_bytes)
    device = jax.local_devices()[0] if device is None else device
    if device.platform == "cpu":
        return host_memory()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise RuntimeError(
            f"device {device} reports no memory statistics; set kv_cache_memory_bytes or "
            "num_gpu_blocks_override instead of a share of the memory."
        )
    total = int(stats["bytes_limit"])
    return DeviceMemory(total, max(0, total - int(stats.get("bytes_in_use", 0))))


def keep_freed_memory() -> bool:
    """Have the C library keep the memory that this process frees, instead of returning it.

    XLA:CPU allocates the temporaries of every step anew. Above 32 MB glibc gets each of them from
    the kernel and gives it back, and the page faults are a fifth of a step. The setting holds for
    the whole process: memory once used for temporaries stays with it.

    Returns:
      Whether it is done; False where the C library is not glibc.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    kept = set_option(_M_MMAP_THRESHOLD, 2**30) and set_option(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(kept)


def release_freed_memory() -> bool:
    """Have the C library return what it keeps of freed memory to the system, now.

    Arrays of up to 32 MB, and larger ones once some were freed, are on glibc's heap, which keeps
    what it once had: weights that are freed one after the other would all still be there.

    Returns:
      Whether it is done; False where the C library is not glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True


def host_memory(root: pathlib.Path = pathlib.Path("/")) -> DeviceMemory:
    """Return the memory of the machine, or of the container if that is less.

    Where Linux' `/proc/meminfo` does not exist, all of the physical memory counts as free.

    Args:
      root: folder that stands for `/`, so that a test can bring its own files.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total = int(fields["MemTotal"].split()[0]) * 1024
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _cgroup_limit_and_use(root)
    if limit is not None and limit < total:
        return DeviceMemory(limit, max(0, min(free, limit - used)))
    return DeviceMemory(total, free)


def _cgroup_limit_and_use(root: pathlib.Path) -> tuple[int | None, int]:
    """Return the container's memory limit, or None, and what it uses of it without page cache."""
    # (folder, limit, use, key of the reclaimable page cache) of cgroup v2 and v1.
    layouts = (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    )
    for folder, limit_name, use_name, cache_key in layouts:
        limit_file, use_file = root / folder / limit_name, root / folder / use_name
        if not (limit_file.exists() and use_file.exists()):
            continue
        limit = limit_file.read_text().strip()
        if limit == "max":
            continue
        used = int(use_file.read_text())
        stat_file = root / folder / "memory.stat"
        if stat_file.exists():
            stat = dict(line.split() for line in stat_file.read_text().splitlines())
            # The kernel gives page cache back before it kills; mapped weights sit in it.
            used = max(0, used - int(stat.get(cache_key, 0)))
        return int(limit), used
    return None, 0
