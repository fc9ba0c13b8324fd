"""`LoRARequest`: which adapter a request is computed with, and where its files are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name, with vLLM's fields.

    Attributes:
      lora_name: what the adapter is called; requests with equal names and paths use one copy of it.
      lora_int_id: vLLM's number of the adapter. It need not be given: here names and contents tell
        adapters apart, never a number.
      lora_path: folder with adapter_config.json and adapter_model.safetensors, or the id of such a
        repository on the Hugging Face Hub.

    Raises:
      ValueError: if the name or the path is empty, or the number below 1.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise ValueError(
                f"lora_name={self.lora_name!r} and lora_path={self.lora_path!r} must both be given."
            )
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id={self.lora_int_id} must be at least 1; leave it out.")
