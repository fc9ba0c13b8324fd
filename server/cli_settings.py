"""From the values of the command line, and the environment, to settings."""

import argparse
import logging
import os
import pathlib
import sys
from typing import Any

from paged.scheduler.config import EngineConfig
from paged.server.cli_observability_options import metrics_fields, observability_settings
from paged.server.json_log import JsonFormatter
from paged.server.settings import CorsSettings, LoRAModule, ServerSettings
from paged.server.tls import TlsFiles


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings.

    Raises: ValueError if they contradict each other.
    """
    if args.fully_sharded_loras:
        raise ValueError(
            "--fully-sharded-loras is not supported: over several devices the matrix of an adapter "
            "that belongs to the split axis is split, and the other, which is small, is on each of "
            "them, so that adapters need no further collective. Leave it out."
        )
    return EngineConfig(
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        performance_mode=args.performance_mode,
        block_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        enable_prefix_caching=args.enable_prefix_caching,
        kv_cache_dtype=args.kv_cache_dtype,
        dtype=args.dtype,
        quantization=args.quantization,
        seed=args.seed,
        attention_backend=args.attention_backend,
        linear_backend=args.linear_backend,
        max_num_queued_reqs=args.max_num_queued_reqs,
        scheduling_policy=args.scheduling_policy,
        enable_chunked_prefill=args.enable_chunked_prefill,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        max_num_partial_prefills=args.max_num_partial_prefills,
        max_long_partial_prefills=args.max_long_partial_prefills,
        async_scheduling=args.async_scheduling,
        prefix_cache_policy=args.prefix_cache_policy,
        prefix_caching_hash_algo=args.prefix_caching_hash_algo,
        kv_offloading_size=args.kv_offloading_size,
        kv_offloading_path=args.kv_offloading_path and os.path.expanduser(args.kv_offloading_path),
        kv_offloading_disk_size=args.kv_offloading_disk_size,
        disable_hybrid_kv_cache_manager=args.disable_hybrid_kv_cache_manager,
        structured_outputs_config=args.structured_outputs_config,
        generation_config=args.generation_config,
        **metrics_fields(args),
        compilation_cache_dir=_compilation_cache_dir(args),
        native_cache_dir=native_cache_dir(args),
        tensor_parallel_size=args.tensor_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        enable_lora=_enable_lora(args),
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        max_cpu_loras=args.max_cpu_loras,
        lora_dtype=args.lora_dtype,
        lora_target_modules=args.lora_target_modules and tuple(args.lora_target_modules),
        artifact=args.artifact and os.path.expanduser(args.artifact),
    )


def lora_modules(args: argparse.Namespace) -> tuple[LoRAModule, ...]:
    """Return the adapters that a command's server has from the start."""
    one = getattr(args, "lora", None)
    return (*(getattr(args, "lora_modules", None) or ()), *([] if one is None else [one]))


def _enable_lora(args: argparse.Namespace) -> bool:
    """Return whether requests may name adapters: if that is said, or there are some."""
    if lora_modules(args) and args.enable_lora is False:
        raise ValueError("--no-enable-lora contradicts the adapters of the command line.")
    return bool(lora_modules(args)) if args.enable_lora is None else bool(args.enable_lora)


def native_cache_dir(args: argparse.Namespace) -> str:
    """Return the folder of the C++ kernels."""
    return str((args.native_cache_dir or _cache_root() / "native").expanduser())


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """Return the settings of the HTTP layer.

    Raises: ValueError for an empty key or name; OSError if the template cannot be read.
    """
    return ServerSettings(
        served_model_names=tuple(args.served_model_name or ()),
        lora_modules=lora_modules(args),
        allow_runtime_lora_updating=_switch("ALLOW_RUNTIME_LORA_UPDATING"),
        api_keys=tuple(args.api_key or filter(None, [key_from_environment()])),
        metrics_require_key=args.metrics_require_key,
        cache_salt_per_key=args.cache_salt_per_key,
        ui=args.ui,
        dev_mode=_switch("SERVER_DEV_MODE"),
        chat_template=None if args.chat_template is None else _read_template(args.chat_template),
        chat_template_content_format=args.chat_template_content_format,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        trust_request_chat_template=args.trust_request_chat_template,
        max_stored_responses=args.max_stored_responses,
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        pooler_config=args.pooler_config,
        exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
        client_max_size=args.client_max_size,
        log_requests=args.enable_log_requests,
        log_stats=not args.disable_log_stats,
        observability=observability_settings(args),
        body_timeout_seconds=args.body_timeout,
        write_timeout_seconds=args.write_timeout,
        max_prompts=args.max_prompts,
        max_n=args.max_n,
        max_logprobs=args.max_logprobs,
        max_stop_strings=args.max_stop_strings,
        max_concurrent_streams=args.max_concurrent_streams,
        max_requests_per_minute=args.max_requests_per_minute,
        cors=CorsSettings(
            origins=tuple(args.allowed_origins),
            methods=tuple(args.allowed_methods),
            headers=tuple(args.allowed_headers),
            allow_credentials=args.allow_credentials,
        ),
        root_path=args.root_path.rstrip("/"),
        request_id_headers=args.enable_request_id_headers,
        sse_keep_alive_seconds=args.sse_keep_alive_interval,
        stream_interval=args.stream_interval,
        force_include_usage=args.enable_force_include_usage,
        return_tokens_as_token_ids=args.return_tokens_as_token_ids,
        response_role=args.response_role,
        override_generation_config=args.override_generation_config,
    )


def tls_files(args: argparse.Namespace) -> TlsFiles | None:
    """Return the files of TLS, None to serve without.

    Raises: ValueError if there is more than a certificate, but no certificate.
    """
    if args.ssl_certfile is None:
        if args.ssl_keyfile or args.ssl_ca_certs or args.ssl_cert_reqs or args.ssl_ciphers:
            raise ValueError("TLS needs a certificate: give --ssl-certfile, too.")
        return None
    if args.ssl_cert_reqs and not args.ssl_ca_certs:
        raise ValueError("--ssl-cert-reqs needs --ssl-ca-certs to check certificates with.")
    return TlsFiles(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        ca_certs=args.ssl_ca_certs,
        requires_client_certificate=args.ssl_cert_reqs == 2,
        ciphers=args.ssl_ciphers,
    )


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options as fields of a request; what was left out is left out."""
    fields = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.sampling_seed,
        "stop": args.stop,
    }
    return {name: value for name, value in fields.items() if value is not None}


def key_from_environment() -> str | None:
    """Return the API key that the environment holds, if any."""
    return os.environ.get("PAGED_API_KEY") or os.environ.get("VLLM_API_KEY")


def _switch(suffix: str) -> bool:
    """Return what the environment says under our own name, else under vLLM's; off if nothing.

    Raises: ValueError for a value that says neither yes nor no.
    """
    names = (f"PAGED_{suffix}", f"VLLM_{suffix}")
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return False
    value = os.environ[name]
    if value not in ("0", "1"):
        raise ValueError(f"${name}={value} must be 0 or 1.")
    return value == "1"


def models_cache_dir() -> str | None:
    """Return the folder of the demo model that the environment names, if any."""
    return os.environ.get("PAGED_MODELS_CACHE") or None


def set_up_logging(level: str, log_format: str = "text") -> None:
    """Log to standard error, a plain line or a JSON object per message."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(levelname)s %(asctime)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    # Only our own messages: those of the libraries are about their insides.
    logging.getLogger("paged").setLevel(level.upper())


def _compilation_cache_dir(args: argparse.Namespace) -> str | None:
    if not args.compilation_cache:
        return None
    if args.compilation_cache_dir is not None:
        return str(args.compilation_cache_dir.expanduser())
    return str(_cache_root() / "xla")


def _cache_root() -> pathlib.Path:
    return pathlib.Path(os.environ.get("PAGED_CACHE_DIR") or "~/.cache/paged").expanduser()


def _read_template(file_or_text: str) -> str:
    """Return the template in a file, or the argument itself if it is one."""
    looks_like_template = "{" in file_or_text or "\n" in file_or_text
    if not looks_like_template:
        try:
            return pathlib.Path(file_or_text).expanduser().read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError):
            raise ValueError(
                f"--chat-template {file_or_text}: there is no such file, and it is no Jinja "
                "template either."
            ) from None
    # As the reference does: shells make it hard to write a line break in an argument.
    return file_or_text.replace("\\n", "\n")
