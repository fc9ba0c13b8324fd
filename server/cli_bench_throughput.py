"""`paged bench throughput`: all prompts at once through an engine in this process."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from paged.scheduler.config import EngineConfig
from paged.server.bench_engine import run_requests, usable_token_ids
from paged.server.bench_prompts import longest, random_lengths, random_tokens
from paged.server.bench_report import check_writable, print_report, versions, write_json
from paged.server.bench_timeline import Timeline, latency_fields
from paged.server.cli_bench import loaded_engine, settings_of
from paged.server.cli_errors import user_errors
from paged.server.cli_settings import engine_config, set_up_logging

if TYPE_CHECKING:
    from paged.scheduler.loading import LoadedEngine

type Run = Callable[..., tuple[list[Timeline], int]]


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the result; return 0.

    Raises: UserError if the model cannot be loaded, the requests not be served or the file not be
      written.
    """
    set_up_logging(args.log_level)
    check_writable(args.json)
    with user_errors(), loaded_engine(args, fitted(engine_config(args), args)) as loaded:
        run_once = random_requests(args, loaded, args.num_prompts)
        for _ in tqdm(range(args.num_warmups), desc="Warm-up", disable=args.disable_tqdm):
            run_once()
        with tqdm(total=args.num_prompts, desc="Requests", disable=args.disable_tqdm) as bar:
            timelines, num_cached_tokens = run_once(on_finished=bar.update)
        result = _figures(timelines) | {"cached_prompt_tokens": num_cached_tokens}
        result |= latency_fields(timelines)
        result["settings"] = settings_of(
            args, loaded, "num_prompts", "num_warmups", "input_len", "output_len",
            "random_range_ratio", "seed",
        )  # fmt: skip
    result["versions"] = versions()
    lines = {
        "Requests": result["num_requests"],
        "Duration (s)": result["elapsed_time"],
        "Prompt tokens": result["total_input_tokens"],
        "Generated tokens": result["total_output_tokens"],
        "Requests per second": result["requests_per_second"],
        "Output tokens per second": result["output_tokens_per_second"],
        "Total tokens per second": result["total_tokens_per_second"],
    }
    print_report("Throughput", lines, timelines)
    write_json(args.json, result)
    return 0


def fitted(config: EngineConfig, args: argparse.Namespace) -> EngineConfig:
    """Return the settings with `max_model_len` of the longest request, where none was given.

    Raises: ValueError if the one that was given would cut requests short.
    """
    lengths = (args.input_len, args.output_len)
    needed = sum(longest(mean, args.random_range_ratio) for mean in lengths)
    if config.max_model_len is None:
        return dataclasses.replace(config, max_model_len=needed)
    if config.max_model_len < needed:
        raise ValueError(
            f"--max-model-len {config.max_model_len} is less than the {needed} tokens of the "
            "longest request; raise it, or lower --input-len or --output-len."
        )
    return config


def random_requests(args: argparse.Namespace, loaded: "LoadedEngine", count: int) -> Run:
    """Return a function that runs `count` new random requests; their lengths are always the same.

    It takes the keyword arguments of `run_requests`, and returns what that does.
    """
    rng = np.random.default_rng(args.seed)
    token_ids = usable_token_ids(loaded.engine, loaded.checkpoint.model_config.vocab_size)
    draw = functools.partial(random_lengths, rng, count, range_ratio=args.random_range_ratio)
    input_lens, output_lens = draw(mean=args.input_len), draw(mean=args.output_len)

    def run_once(**options: Any) -> tuple[list[Timeline], int]:
        prompts = random_tokens(rng, input_lens, token_ids)
        return run_requests(loaded.engine, prompts, output_lens, **options)

    return run_once


def _figures(timelines: list[Timeline]) -> dict[str, Any]:
    """Return counts and rates; names without "_per_second" and `tokens_per_second` are vLLM's."""
    elapsed = max(timeline.e2el for timeline in timelines)
    num_input = sum(timeline.num_prompt_tokens for timeline in timelines)
    num_output = sum(timeline.num_output_tokens for timeline in timelines)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(timelines),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(timelines) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        "total_tokens_per_second": (num_input + num_output) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
    }
