"""`paged bench throughput`: all prompts at once through an engine in this process."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from paged.scheduler.config import EngineConfig
from paged.server.bench_datasets import Session, make_sessions
from paged.server.bench_engine import run_requests, usable_token_ids
from paged.server.bench_page import run_page
from paged.server.bench_report import (
    check_writable,
    print_report,
    versions,
    write_json,
    write_text,
)
from paged.server.bench_serving import goodput_fields
from paged.server.bench_spelling import TokenSpeller
from paged.server.bench_timeline import Timeline, latency_fields
from paged.server.cli_bench import loaded_engine, settings_of
from paged.server.cli_bench_dataset_options import dataset_settings
from paged.server.cli_errors import user_errors
from paged.server.cli_settings import engine_config, set_up_logging

if TYPE_CHECKING:
    from paged.scheduler.loading import LoadedEngine

type Run = Callable[..., tuple[list[Timeline], int]]


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the result; return 0.

    Raises: UserError if the model cannot be loaded, the requests not be served or a file not be
      written.
    """
    set_up_logging(args.log_level)
    check_writable(args.json)
    check_writable(args.html)
    with user_errors():
        sessions = make_sessions(args, np.random.default_rng(args.seed))
        config = fitted(engine_config(args), longest_request(sessions))
        with loaded_engine(args, config) as loaded:
            run_once = requests_of(args.seed, loaded, sessions)
            for _ in tqdm(range(args.num_warmups), desc="Warm-up", disable=args.disable_tqdm):
                run_once()
            with tqdm(total=args.num_prompts, desc="Requests", disable=args.disable_tqdm) as bar:
                timelines, num_cached_tokens = run_once(on_finished=bar.update)
            settings = settings_of(args, loaded, "num_prompts", "num_warmups")
    result = dict(args.metadata) | _figures(timelines)
    result |= {"cached_prompt_tokens": num_cached_tokens}
    result |= goodput_fields(args, timelines, result["elapsed_time"]) | latency_fields(timelines)
    result |= {"settings": dataset_settings(args) | settings, "versions": versions()}
    lines = {
        "Requests": result["num_requests"],
        "Duration (s)": result["elapsed_time"],
        "Prompt tokens": result["total_input_tokens"],
        "Cached prompt tokens": num_cached_tokens,
        "Generated tokens": result["total_output_tokens"],
        "Requests per second": result["requests_per_second"],
        "Output tokens per second": result["output_tokens_per_second"],
        "Total tokens per second": result["total_tokens_per_second"],
    }
    if args.goodput:
        lines["Request goodput (req/s)"] = result["request_goodput"]
    print_report("Throughput", lines, timelines)
    write_json(args.json, result)
    title = f"{settings['model']} in process"
    write_text(args.html, lambda: run_page(title, lines, result, timelines))
    return 0


def longest_request(sessions: Sequence[Session]) -> int | None:
    """Return the tokens of the longest request; None if texts have yet to be tokenized.

    Raises: ValueError for the messages of a chat.
    """
    turns = [turn for session in sessions for turn in session]
    if any(not isinstance(turn.content, str | tuple) for turn in turns):
        raise ValueError(
            'a chat ("messages") cannot be measured in this process; write its "prompt", or use '
            "`paged bench serve --endpoint /v1/chat/completions`."
        )
    if any(isinstance(turn.content, str) for turn in turns):
        return None
    return max(turn.num_tokens + turn.output_len for turn in turns)


def fitted(config: EngineConfig, needed: int | None) -> EngineConfig:
    """Return the settings with `max_model_len` of the longest request, where none was given.

    Raises: ValueError if the one that was given would cut requests short.
    """
    if needed is None:
        return config
    if config.max_model_len is None:
        return dataclasses.replace(config, max_model_len=needed)
    if config.max_model_len < needed:
        raise ValueError(
            f"--max-model-len {config.max_model_len} is less than the {needed} tokens of the "
            "longest request; raise it, or lower --input-len or --output-len."
        )
    return config


def requests_of(seed: int, loaded: "LoadedEngine", sessions: Sequence[Session]) -> Run:
    """Return a function that runs the requests; their lengths are always the same.

    Named content is another in every run. The function takes the keyword arguments of
    `run_requests`, and returns what that does.
    """
    token_ids = usable_token_ids(loaded.engine, loaded.checkpoint.model_config.vocab_size)
    turns = [turn for session in sessions for turn in session]
    output_lens = [turn.output_len for turn in turns]
    runs = 0

    def run_once(**options: Any) -> tuple[list[Timeline], int]:
        nonlocal runs
        speller = TokenSpeller(seed + runs, token_ids)
        runs += 1
        prompts = [
            speller.spell(turn.content)
            if isinstance(turn.content, tuple)
            else loaded.engine.tokenizer.encode(str(turn.content))
            for turn in turns
        ]
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
