"""What the hardware is and which backend serves it; no other file asks."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import jax

XLA = "xla"

# Backends of a platform, best first; every tuple ends with the one that serves anything.
_PREFERENCE = {"cpu": (XLA,), "gpu": (XLA,), "tpu": (XLA,)}
BACKENDS = (XLA,)
"""Every backend there is, on whatever platform."""


def resolve_backend(requested: str, platform: str | None = None) -> str:
    """Return the name of the backend that serves `platform`.

    Args:
      requested: "auto", or a backend's name, which is a promise: that one or an error.
      platform: "cpu", "gpu" or "tpu" as JAX names it; None asks JAX.

    Raises:
      ValueError: for a name that is no backend.
      NotImplementedError: for a backend that does not run on this platform.
    """
    if requested != "auto" and requested not in BACKENDS:
        raise ValueError(
            f"attention backend {requested!r} is unknown; "
            f"choose one of auto, {', '.join(BACKENDS)}."
        )
    platform = platform or jax.default_backend()
    available = _PREFERENCE.get(platform, (XLA,))
    if requested == "auto":
        return available[0]
    if requested not in available:
        raise NotImplementedError(
            f"attention backend {requested!r} does not run on {platform!r}; "
            f"choose one of auto, {', '.join(available)}."
        )
    return requested


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the device that holds the KV cache, in bytes."""

    total_bytes: int
    free_bytes: int


def device_memory() -> DeviceMemory:
    """Return total and free memory of the first device; a CPU's is what this process may use.

    Raises:
      RuntimeError: if the device does not tell.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _host_memory()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise RuntimeError(
            f"{device} reports no memory statistics; set kv_cache_memory_bytes or "
            "num_gpu_blocks_override instead of a share of the memory."
        )
    total = int(stats["bytes_limit"])
    return DeviceMemory(total, total - int(stats.get("bytes_in_use", 0)))


def _host_memory() -> DeviceMemory:
    page_bytes = resource.getpagesize()
    total = os.sysconf("SC_PHYS_PAGES") * page_bytes
    free = _meminfo_available() or os.sysconf("SC_AVPHYS_PAGES") * page_bytes
    limit = _cgroup_bytes("memory.max")
    if limit is not None:
        total = min(total, limit)
        free = min(free, limit - (_cgroup_bytes("memory.current") or 0))
    return DeviceMemory(total, max(free, 0))


def _meminfo_available() -> int | None:
    """Return what Linux believes new programs can have without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_bytes(name: str) -> int | None:
    """Return a figure of this process's control group, None if there is none or no limit."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
