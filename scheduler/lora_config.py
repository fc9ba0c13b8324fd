"""`LoRAConfig`: how many adapters there is room for, and how large they may be."""

from dataclasses import dataclass

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LORA_DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Settings of LoRA adapters; names and defaults are vLLM's.

    Attributes:
      max_loras: adapters on the device at once, hence most different ones in a step.
      max_lora_rank: largest rank of an adapter; every place on the device has room for it.
      max_cpu_loras: adapters kept in host memory for requests to come, least recently used out
        first; None: as many as `max_loras`. Those of unfinished requests are there besides.
      lora_dtype: element type of adapters on the device; "auto" is the model's.
      target_modules: names of the linear layers that adapters may change, such as "q_proj"; others
        take no memory. None: all of them.

    Raises:
      ValueError: for a value out of range.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    target_modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_loras < 1:
            raise ValueError(f"max_loras={self.max_loras} must be at least 1.")
        if self.max_lora_rank not in LORA_RANKS:
            raise ValueError(
                f"max_lora_rank={self.max_lora_rank} must be one of "
                f"{', '.join(map(str, LORA_RANKS))}."
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}."
            )
        if self.lora_dtype not in LORA_DTYPES:
            raise ValueError(
                f"lora_dtype={self.lora_dtype!r} is unknown; choose one of "
                f"{', '.join(LORA_DTYPES)}."
            )
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("lora_target_modules must name a linear layer; leave it out for all.")

    @property
    def num_host_loras(self) -> int:
        """Adapters kept in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
