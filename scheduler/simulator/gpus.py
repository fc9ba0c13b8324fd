"""Data-sheet figures of GPUs, by name."""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class GPU:
    """What a data sheet says about one GPU.

    Attributes:
      name: as in `GPUS`.
      bf16_flops: dense bfloat16 matrix products with float32 accumulation, FLOP per second.
      fp8_flops: the same for 8-bit floats; equal to `bf16_flops` where there is no such unit.
      bytes_per_second: memory bandwidth.
      memory_bytes: memory that the driver reports, about.
      link_bytes_per_second: to the other GPUs of a node, in one direction.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    bytes_per_second: float
    memory_bytes: int
    link_bytes_per_second: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which arithmetic is the limit, by the data sheet, in 16 bits."""
        return self.bf16_flops / self.bytes_per_second


def _gpu(
    name: str, bf16: float, fp8: float, gb_per_second: float, gib: float, link_gb: float
) -> GPU:
    """Units: TFLOP/s, TFLOP/s, GB/s, GiB, GB/s."""
    return GPU(
        name, bf16 * 1e12, fp8 * 1e12, gb_per_second * 1e9, int(gib * GIB), link_gb * 1e9
    )  # fmt: skip


# Sources: the vendors' data sheets. They often print figures with 2:4 sparsity, which are halved
# here. Links: NVLink (Infinity Fabric for mi300x), else PCI Express.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 312, 312, 1555, 39.6, 300),
        _gpu("a100", 312, 312, 2039, 79.2, 300),
        _gpu("h100", 989.4, 1978.9, 3350, 79.2, 450),
        _gpu("h100-pcie", 756, 1513, 2000, 79.2, 64),
        _gpu("h200", 989.4, 1978.9, 4800, 139.8, 450),
        _gpu("h20", 148, 296, 4000, 95.1, 450),
        _gpu("b200", 2250, 4500, 8000, 178.4, 900),
        _gpu("a10", 125, 125, 600, 22.0, 32),
        _gpu("l4", 121, 242.5, 300, 22.0, 32),
        _gpu("l40s", 362, 733, 864, 44.4, 32),
        _gpu("rtx-4090", 165.2, 330.3, 1008, 23.5, 32),
        _gpu("rtx-5090", 209.5, 419, 1792, 31.4, 64),
        _gpu("mi300x", 1307.4, 2614.9, 5300, 191.0, 448),
    )
}


def find_gpu(name: str) -> GPU:
    """Return the GPU of a name; case, spaces, hyphens and underscores do not matter.

    Raises: ValueError with the names there are.
    """
    wanted = _plain(name)
    for gpu in GPUS.values():
        if _plain(gpu.name) == wanted:
            return gpu
    raise ValueError(f"gpu={name!r} is unknown; known are {', '.join(GPUS)}.")


def gpu_of_figures(
    name: str | None = None,
    *,
    memory_gib: float | None = None,
    gb_per_second: float | None = None,
    tflops: float | None = None,
    link_gb_per_second: float | None = None,
) -> GPU:
    """Return a GPU by its figures, or one of the table with some of them replaced.

    Args:
      name: of the table; None: another GPU, whose first three figures must be given.
      memory_gib: memory that the driver reports, GiB.
      gb_per_second: memory bandwidth, GB/s.
      tflops: dense 16-bit matrix products, TFLOP/s.
      link_gb_per_second: to the other GPUs, GB/s in one direction; None: PCI Express 4.0, 32.

    Raises: ValueError for a figure that is missing or not above 0.
    """
    figures = {"--gpu-memory": memory_gib, "--bandwidth": gb_per_second, "--tflops": tflops}
    for option, value in (*figures.items(), ("--link-bandwidth", link_gb_per_second)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{option}={value} must be a number above 0.")
    missing = [option for option, value in figures.items() if value is None]
    if name is None and missing:
        raise ValueError(
            f"{', '.join(missing)} missing: a GPU that is not in the table needs --gpu-memory, "
            "--bandwidth and --tflops; or name one with --gpu."
        )
    gpu = _gpu("custom", 1, 1, 1, 1, 32) if name is None else find_gpu(name)
    given: dict[str, float | None] = {
        "memory_bytes": memory_gib and int(memory_gib * GIB),
        "bytes_per_second": gb_per_second and gb_per_second * 1e9,
        "bf16_flops": tflops and tflops * 1e12,
        "fp8_flops": tflops and tflops * 1e12,
        "link_bytes_per_second": link_gb_per_second and link_gb_per_second * 1e9,
    }
    given = {field: value for field, value in given.items() if value is not None}
    return dataclasses.replace(gpu, **given)  # type: ignore[arg-type]


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")
