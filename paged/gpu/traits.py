"""What kernels and their heuristics need to know of a GPU."""

import dataclasses

import jax

from paged import backends


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU.

    Attributes:
      compute_capability: as in sm_90: 90.
      num_multiprocessors: how many there are.
    """

    compute_capability: int
    num_multiprocessors: int

    @property
    def has_float8(self) -> bool:
        """Whether it converts from float8 e4m3 in hardware."""
        return self.compute_capability >= 89


def describe(device: jax.Device) -> Gpu:
    """Return what a device, or the description of an absent one, says of itself."""
    major, _, minor = device.compute_capability.partition(".")
    return Gpu(10 * int(major) + int(minor), device.core_count)


def current_gpu() -> Gpu:
    """Return the GPU that programs are being traced for."""
    return describe(backends.current_device())
