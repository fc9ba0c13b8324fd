"""Options of the command line that become an `EngineConfig`: model, memory, scheduling."""

import argparse
import dataclasses
import pathlib
from typing import Any

import msgspec

from paged.scheduler.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    KV_CACHE_DTYPES,
    LINEAR_BACKENDS,
    PERFORMANCE_MODES,
    QUANTIZATIONS,
    EngineConfig,
)
from paged.scheduler.eviction.policies import POLICIES
from paged.scheduler.prefix_cache import HASH_ALGORITHMS
from paged.scheduler.request_queue import SCHEDULING_POLICIES
from paged.scheduler.structured.config import StructuredOutputsConfig
from paged.server.cli_lora_options import add_lora_options
from paged.server.cli_options import LOG_LEVELS, size


def gib(text: str) -> float:
    """Parse a number of GiB, without a suffix as in the reference."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of GiB; write 4 or 0.5, for example"
        ) from None


def structured_outputs_config(text: str) -> StructuredOutputsConfig:
    """Parse the JSON object of settings of structured outputs."""
    known = {field.name for field in dataclasses.fields(StructuredOutputsConfig)}
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
        # The reference has several backends; this is the one here.
        if fields.pop("backend", "auto") not in ("auto", "guidance"):
            raise ValueError("the only backend is guidance")
        if unknown := sorted(fields.keys() - known):
            raise ValueError(f"unknown {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return msgspec.convert(fields, StructuredOutputsConfig)
    except (msgspec.DecodeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def add_engine_options(
    parser: argparse.ArgumentParser,
    *,
    log_level: str,
    max_num_seqs: int | None = None,
    prefix_cache_policy: str | None = None,
) -> None:
    """Add what concerns model, memory and scheduling.

    Args:
      parser: of the command.
      log_level: default of the command.
      max_num_seqs: default of the command; None is by device.
      prefix_cache_policy: default of the command; None is that of `EngineConfig`.
    """
    defaults = EngineConfig()
    _add_model_options(parser, defaults)
    _add_parallel_options(parser, defaults)
    _add_memory_options(parser, defaults)
    _add_prefix_cache_options(parser, defaults, prefix_cache_policy)
    _add_scheduling_options(parser, defaults, max_num_seqs)
    add_lora_options(parser, defaults)
    group = parser.add_argument_group("logging")
    group.add_argument(
        "--log-level", choices=LOG_LEVELS, default=log_level, help="least severe messages shown"
    )


def add_native_cache_option(parser: argparse._ActionsContainer) -> None:
    """Add where the C++ kernels are kept."""
    parser.add_argument(
        "--native-cache-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of compiled C++ kernels (default: $PAGED_CACHE_DIR/native, else "
        "~/.cache/paged/native)",
    )


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    """Add those of `paged convert`."""
    parser.add_argument(
        "--out", metavar="DIR", type=pathlib.Path, required=True, help="folder; new or empty"
    )
    _add_checkpoint_options(parser, EngineConfig())
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info", help="least severe messages shown"
    )


def _add_checkpoint_options(group: argparse._ActionsContainer, defaults: EngineConfig) -> None:
    """Add which checkpoint it is, and what its weights become."""
    group.add_argument("--revision", help="branch, tag or commit on the Hub (default: main)")
    group.add_argument(
        "--hf-token", metavar="TOKEN", help="Hub access token (default: the one you logged in with)"
    )
    group.add_argument(
        "--dtype", choices=DTYPES, default=defaults.dtype, help="type of weights and activations"
    )
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default=defaults.quantization,
        help="int8, int4, fp8: keep the weights of linear layers in so many bits; awq, gptq, "
        "compressed-tensors, fp8: insist that the checkpoint is quantised so (default: as it is)",
    )


def _add_model_options(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    group = parser.add_argument_group("model")
    _add_checkpoint_options(group, defaults)
    group.add_argument(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        default=defaults.attention_backend,
        help="implementation of attention; native: C++ kernels for a CPU, compiled on first use; a "
        "name is that one or an error",
    )
    group.add_argument(
        "--linear-backend",
        choices=LINEAR_BACKENDS,
        default=defaults.linear_backend,
        help="implementation of matrix products; as --attention-backend",
    )
    group.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        default=defaults.generation_config,
        help="auto: sampling defaults from the model; vllm: neutral ones",
    )
    group.add_argument(
        "--structured-outputs-config",
        type=structured_outputs_config,
        default="{}",
        metavar="JSON",
        help="limits and defaults of schemas and grammars (docs/serving.md)",
    )
    group.add_argument(
        "--seed", type=int, default=defaults.seed, help="seed of requests that bring none"
    )
    group.add_argument(
        "--compilation-cache-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of compiled programs (default: $PAGED_CACHE_DIR/xla, else ~/.cache/paged/xla)",
    )
    group.add_argument(
        "--compilation-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep compiled programs for the next start",
    )
    add_native_cache_option(group)
    group.add_argument(
        "--artifact",
        metavar="DIR",
        help="programs that `paged compile` exported for this model and these settings; the model "
        "is not traced then, and Triton is not needed",
    )


def _add_parallel_options(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    group = parser.add_argument_group("several devices")
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=size,
        default=defaults.tensor_parallel_size,
        metavar="N",
        help="devices that share the model; must divide its heads, MLP features and vocabulary",
    )
    group.add_argument(
        "--enable-expert-parallel",
        action=argparse.BooleanOptionalAction,
        default=defaults.enable_expert_parallel,
        help="split a mixture by experts: each device has whole ones",
    )


def _add_memory_options(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    group = parser.add_argument_group(
        "memory",
        "The KV cache holds what attention remembers of each token, keys and values, in blocks.",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=defaults.gpu_memory_utilization,
        metavar="SHARE",
        help="share of the device's memory to use",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=size,
        metavar="BYTES",
        help="size of the KV cache, such as 4G, instead of a share",
    )
    group.add_argument(
        "--num-gpu-blocks-override",
        type=size,
        metavar="N",
        help="number of KV blocks, instead of a size",
    )
    group.add_argument(
        "--block-size",
        type=size,
        default=defaults.block_size,
        metavar="TOKENS",
        help="tokens per KV block, the unit of the cache",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default=defaults.kv_cache_dtype,
        help="type of the KV cache; auto: the model's",
    )
    group.add_argument(
        "--disable-hybrid-kv-cache-manager",
        action=argparse.BooleanOptionalAction,
        default=defaults.disable_hybrid_kv_cache_manager,
        help="keep all blocks of sliding-window layers, as if they attended to everything",
    )


def _add_prefix_cache_options(
    parser: argparse.ArgumentParser, defaults: EngineConfig, policy: str | None
) -> None:
    group = parser.add_argument_group("prefix cache", "docs/serving.md says what to choose when.")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=defaults.enable_prefix_caching,
        help="reuse the KV of prompts that begin alike",
    )
    group.add_argument(
        "--prefix-cache-policy",
        choices=POLICIES,
        default=policy or defaults.prefix_cache_policy,
        help="which cached block makes room for a new one",
    )
    group.add_argument(
        "--prefix-caching-hash-algo",
        choices=HASH_ALGORITHMS,
        default=defaults.prefix_caching_hash_algo,
        help="how blocks are named; not xxhash where tenants share a server",
    )
    group.add_argument(
        "--kv-offloading-size",
        type=gib,
        default=defaults.kv_offloading_size,
        metavar="GIB",
        help="host memory, in GiB, for blocks evicted from the device; 0: none",
    )
    group.add_argument(
        "--kv-offloading-path",
        metavar="DIR",
        help="folder for blocks evicted from that memory; needs --kv-offloading-size",
    )
    group.add_argument(
        "--kv-offloading-disk-size",
        type=gib,
        metavar="GIB",
        help="most GiB in that folder (default: until the disk is full)",
    )


def _add_scheduling_options(
    parser: argparse.ArgumentParser, defaults: EngineConfig, max_num_seqs: int | None
) -> None:
    group = parser.add_argument_group(
        "scheduling",
        "A step computes tokens of many requests at once; here is which, and how many.",
    )
    group.add_argument(
        "--max-model-len",
        type=size,
        metavar="TOKENS",
        help="longest prompt plus output; suffixes: k, K (1000, 1024) (default: the model's own)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=size,
        default=max_num_seqs,
        metavar="N",
        help="most requests running at once"
        + (" (default: by device)" if max_num_seqs is None else ""),
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=size,
        metavar="TOKENS",
        help="most tokens computed in one step (default: by device)",
    )
    group.add_argument(
        "--performance-mode",
        choices=PERFORMANCE_MODES,
        default=defaults.performance_mode,
        help="throughput: twice the default of each of the two limits above that is not set; "
        "interactivity: steadier and shorter steps, for more programs to compile",
    )
    group.add_argument(
        "--max-num-queued-reqs",
        type=size,
        default="1024",
        metavar="N",
        help="most waiting requests; further ones are refused with 429",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        default=defaults.scheduling_policy,
        help="fcfs: in order of arrival; priority: by the requests' priority, lower first",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=defaults.enable_chunked_prefill,
        help="let prompts enter in parts; without it a step must hold the longest prompt",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=size,
        default=defaults.long_prefill_token_threshold,
        metavar="TOKENS",
        help="most tokens of one prompt per step while others are there; 0: no limit",
    )
    group.add_argument(
        "--max-num-partial-prefills",
        type=size,
        metavar="N",
        help="most prompts that are partly computed at once (default: no limit)",
    )
    group.add_argument(
        "--max-long-partial-prefills",
        type=size,
        metavar="N",
        help="most long ones among them; shorter prompts overtake the others (default: no limit)",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=defaults.async_scheduling,
        help="plan each step while the device works on the one before (default: on, but off on a "
        "CPU)",
    )
