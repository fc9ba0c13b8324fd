"""`paged bench serve`: a server under load, as its clients see it."""

import argparse
import asyncio
import collections
import datetime
import math
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from paged.server.bench_load import BenchClient, arrival_times, send_all
from paged.server.bench_prompts import random_lengths, random_tokens, random_words
from paged.server.bench_report import check_writable, print_report, versions, write_json
from paged.server.bench_timeline import (
    Timeline,
    latency_fields,
    peak_concurrency,
    peak_tokens_per_second,
)
from paged.server.cli_errors import UserError
from paged.server.cli_settings import key_from_environment

# Different messages of failed requests that are shown.
_MAX_SHOWN_ERRORS = 5


def run(args: argparse.Namespace) -> int:
    """Send the load, print and write the result; return 0, or 130 if Ctrl-C ended it early.

    Raises: UserError if the server cannot be used, no request succeeds or the file cannot be
      written.
    """
    check_writable(args.json)
    timelines, seconds, complete = asyncio.run(_measure(args))
    done = [timeline for timeline in timelines if timeline.finished]
    errors = collections.Counter(timeline.error for timeline in timelines if timeline.error)
    if not done:
        if not complete:
            raise KeyboardInterrupt
        first = errors.most_common(1)[0][0]
        raise UserError(f"none of {len(timelines)} requests succeeded: {' '.join(first.split())}")
    result = _result(args, timelines, done, seconds)
    _print(args, result, done)
    for message, count in errors.most_common(_MAX_SHOWN_ERRORS):
        print(f"{count} failed: {' '.join(message.split())}", file=sys.stderr)
    if not complete:
        left = result["interrupted"]
        print(f"Interrupted: {left} requests were not finished.", file=sys.stderr)
    write_json(args.json, result)
    return 0 if complete else 130


async def _measure(args: argparse.Namespace) -> tuple[list[Timeline], float, bool]:
    """Return the timelines, the seconds until the last one ended, and whether all did."""
    key = args.api_key or key_from_environment()
    async with BenchClient(args.base_url, args.endpoint, key) as client:
        args.model = await client.check_model(args.model)
        rng = np.random.default_rng(args.seed)
        prefix = _prompts(args, rng, [args.random_prefix_len])[0]
        warmups = _requests(args, rng, args.num_warmups, prefix)
        bodies, timelines = _requests(args, rng, args.num_prompts, prefix)
        due = arrival_times(rng, args.num_prompts, args.request_rate, args.burstiness)
        if not await send_all(
            client, *warmups, np.zeros(args.num_warmups), max_concurrency=args.max_concurrency
        ):
            return timelines, 0.0, False
        with tqdm(total=args.num_prompts, desc="Requests", disable=args.disable_tqdm) as bar:
            start = asyncio.get_running_loop().time()
            complete = await send_all(
                client,
                bodies,
                timelines,
                due,
                max_concurrency=args.max_concurrency,
                on_finished=bar.update,
            )
            return timelines, asyncio.get_running_loop().time() - start, complete


def _requests(
    args: argparse.Namespace, rng: np.random.Generator, count: int, prefix: Any
) -> tuple[list[dict[str, Any]], list[Timeline]]:
    """Return bodies of random requests, and a timeline for each."""
    ratio = args.random_range_ratio
    input_lens = random_lengths(rng, count, args.random_input_len, ratio)
    output_lens = random_lengths(rng, count, args.random_output_len, ratio)
    separator = " " if isinstance(prefix, str) and prefix else type(prefix)()
    bodies = [
        _body(args, prefix + separator + prompt, output_len)
        for prompt, output_len in zip(_prompts(args, rng, input_lens), output_lens, strict=True)
    ]
    # A server that does not count tokens is taken at our word.
    return bodies, [Timeline(num_prompt_tokens=len(prefix) + length) for length in input_lens]


def _prompts(args: argparse.Namespace, rng: np.random.Generator, lengths: list[int]) -> list[Any]:
    """Return random prompts as the endpoint takes them: token ids, or the text of a message."""
    if _is_chat(args):
        return random_words(rng, lengths)
    # The ids of special tokens are first in most vocabularies.
    low = min(256, args.vocab_size // 2)
    return random_tokens(rng, lengths, range(low, args.vocab_size))


def _body(args: argparse.Namespace, prompt: Any, output_len: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": args.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "ignore_eos": args.ignore_eos or None,
    }
    if _is_chat(args):
        body |= {
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": output_len,
        }
    else:
        body |= {"prompt": prompt, "max_tokens": output_len}
    body = {name: value for name, value in body.items() if value is not None}
    return {**body, **args.extra_body}


def _is_chat(args: argparse.Namespace) -> bool:
    return bool(args.endpoint.endswith("/chat/completions"))


def _result(
    args: argparse.Namespace, timelines: list[Timeline], done: list[Timeline], seconds: float
) -> dict[str, Any]:
    """Return everything under vLLM's names where it has them; rates count what succeeded."""
    num_input = sum(timeline.num_prompt_tokens for timeline in done)
    num_output = sum(timeline.num_output_tokens for timeline in done)
    failed = sum(timeline.error is not None for timeline in timelines)
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "model_id": args.model,
        "base_url": args.base_url,
        "endpoint": args.endpoint,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": "inf" if math.isinf(args.burstiness) else args.burstiness,
        "max_concurrency": args.max_concurrency,
        "duration": seconds,
        "completed": len(done),
        "failed": failed,
        "interrupted": len(timelines) - len(done) - failed,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_output_tokens_per_s": peak_tokens_per_second(done),
        "max_concurrent_requests": peak_concurrency(done),
        **latency_fields(done),
        "settings": {
            name: getattr(args, name)
            for name in (
                "random_input_len", "random_output_len", "random_prefix_len", "random_range_ratio",
                "vocab_size", "seed", "num_warmups", "ignore_eos", "temperature", "top_p", "top_k",
                "extra_body",
            )
        },
        "versions": versions(),
    }  # fmt: skip


def _print(args: argparse.Namespace, result: dict[str, Any], done: list[Timeline]) -> None:
    lines: dict[str, object] = {
        "Successful requests": result["completed"],
        "Failed requests": result["failed"],
        "Request rate configured (RPS)": result["request_rate"],
        "Benchmark duration (s)": result["duration"],
        "Total input tokens": result["total_input_tokens"],
        "Total generated tokens": result["total_output_tokens"],
        "Request throughput (req/s)": result["request_throughput"],
        "Output token throughput (tok/s)": result["output_throughput"],
        "Peak output tokens of a second": result["max_output_tokens_per_s"],
        "Peak concurrent requests": result["max_concurrent_requests"],
        "Total token throughput (tok/s)": result["total_token_throughput"],
    }
    if args.max_concurrency is not None:
        lines["Maximum request concurrency"] = args.max_concurrency
    print_report("Serving Benchmark Result", lines, done)
