"""`LatentConfig`: the numbers of multi-head latent attention, and how `config.json` gives them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged.models.config_values import positive_int
from paged.models.errors import UnsupportedModelError
from paged.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The shape of latent attention; hashable, like `ModelConfig`.

    Attributes:
      kv_rank: features of the vector that all heads' keys and values of a token are made of.
      q_rank: the same of queries; None: they are made of the residual stream.
      nope_dim, rope_dim: features of a query and a key without and with a position; the latter
        are one key that all heads share.
      value_dim: features of a head's value.
      is_interleaved: features 2i and 2i + 1 are rotated against each other, instead of i and
        i + rope_dim / 2.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool = True

    @property
    def head_dim(self) -> int:
        """Features of a vector in the cache: the rotated key, and what the rest is made of."""
        return self.rope_dim + self.kv_rank

    @property
    def qk_dim(self) -> int:
        """Features of a query and a key of one head."""
        return self.nope_dim + self.rope_dim


def read_latent(config: Mapping[str, Any]) -> LatentConfig:
    """Return the latent attention that a config describes.

    Raises:
      CheckpointError: if a key is missing or its value cannot be.
      UnsupportedModelError: if the part with positions has an odd number of features.
    """
    has_q_rank = config.get("q_lora_rank") is not None
    rope_dim = positive_int(config, "qk_rope_head_dim")
    if rope_dim % 2:
        raise UnsupportedModelError(
            f"qk_rope_head_dim={rope_dim} is odd; rotary embedding needs pairs of features."
        )
    return LatentConfig(
        kv_rank=positive_int(config, "kv_lora_rank"),
        q_rank=positive_int(config, "q_lora_rank") if has_q_rank else None,
        nope_dim=positive_int(config, "qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=positive_int(config, "v_head_dim"),
        is_interleaved=config.get("rope_interleave") is not False,
    )


def latent_scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """Return what attention logits are multiplied by.

    YaRN's factor on queries and keys stands here, for both parts of them, and not on the rotation
    alone: `mscale_all_dim` says how large it is, and `rope.attention_factor` leaves it out.
    """
    scale = 1 / math.sqrt(latent.qk_dim)
    if rope.mscale_all_dim is None or rope.factor <= 1:
        return scale
    factor = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return scale * factor * factor
