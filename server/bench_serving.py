"""A load on a server: sends it, and works out the figures, under vLLM's names where it has them."""

import argparse
import asyncio
import collections
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from paged.server.bench_arrivals import due_times
from paged.server.bench_bodies import make_exchanges
from paged.server.bench_datasets import Session, Turn, make_sessions
from paged.server.bench_load import BenchClient, Exchange, send_sessions
from paged.server.bench_report import versions
from paged.server.bench_timeline import (
    Timeline,
    cached_tokens,
    latency_fields,
    meets,
    peak_concurrency,
    peak_tokens_per_second,
)
from paged.server.cli_bench_dataset_options import dataset_settings
from paged.server.cli_bench_serve_options import BACKENDS, DEFAULT_BASE_URL, ENDPOINTS
from paged.server.cli_errors import UserError, user_errors
from paged.server.cli_options import DEFAULT_PORT
from paged.server.cli_settings import key_from_environment


@dataclass(frozen=True)
class Measurement:
    """What came of a load.

    Attributes:
      timelines: of all requests.
      seconds: from the first sending to the last end.
      complete: whether nobody interrupted it.
    """

    timelines: Sequence[Timeline]
    seconds: float
    complete: bool

    @property
    def done(self) -> list[Timeline]:
        """The requests that succeeded."""
        return [timeline for timeline in self.timelines if timeline.finished]

    @property
    def errors(self) -> collections.Counter[str]:
        """Messages of the requests that failed, and how often they came."""
        return collections.Counter(timeline.error for timeline in self.timelines if timeline.error)

    def check(self) -> None:
        """Raise UserError if no request succeeded, KeyboardInterrupt if one would have."""
        if not self.done:
            if not self.complete:
                raise KeyboardInterrupt
            first = " ".join(self.errors.most_common(1)[0][0].split())
            raise UserError(f"none of {len(self.timelines)} requests succeeded: {first}")


def resolve_server(args: argparse.Namespace) -> None:
    """Set `base_url` from host and port, and `endpoint` from the backend, if those are given.

    Raises: UserError if they contradict each other.
    """
    if args.host is not None or args.port is not None:
        if args.base_url != DEFAULT_BASE_URL:
            raise UserError(
                "--host and --port take the place of --base-url; leave one of them out."
            )
        host = args.host or "127.0.0.1"
        bracketed = f"[{host}]" if ":" in host else host
        args.base_url = f"http://{bracketed}:{DEFAULT_PORT if args.port is None else args.port}"
        args.host = args.port = None
    if args.backend is not None:
        endpoint = BACKENDS[args.backend]
        if args.endpoint not in (ENDPOINTS[0], endpoint):
            raise UserError(f"--backend {args.backend} is {endpoint}, not {args.endpoint}.")
        args.endpoint = endpoint


def measure(args: argparse.Namespace) -> Measurement:
    """Send the load that the options of `serve` describe; `args` then has what they stand for.

    Raises: UserError if the server or the prompts cannot be used.
    """
    resolve_server(args)
    with user_errors():
        return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> Measurement:
    key = args.api_key or key_from_environment()
    headers = dict(args.header)
    async with BenchClient(
        args.base_url, args.endpoint, key, headers=headers, insecure=args.insecure
    ) as client:
        args.model = await client.check_model(
            args.model, ready_seconds=args.ready_check_timeout_sec
        )
        for name in args.lora_modules or ():
            await client.check_model(name)
        rng = np.random.default_rng(args.seed)
        sessions = make_sessions(args, rng)
        exchanges = make_exchanges(args, sessions)
        warmups = make_exchanges(args, _warmups(sessions, args.num_warmups))
        due = due_times(args, rng, len(sessions))
        timelines = [exchange.timeline for session in exchanges for exchange in session]
        if args.request_id_prefix is not None:
            for index, timeline in enumerate(timelines):
                timeline.request_id = f"{args.request_id_prefix}{index}"
        if not await send_sessions(
            client, warmups, np.zeros(len(warmups)), max_concurrency=args.max_concurrency
        ):
            return Measurement(timelines, 0.0, complete=False)
        return await _timed(args, client, exchanges, timelines, due)


async def _timed(
    args: argparse.Namespace,
    client: BenchClient,
    exchanges: Sequence[Sequence[Exchange]],
    timelines: Sequence[Timeline],
    due: np.ndarray,
) -> Measurement:
    with tqdm(total=args.num_prompts, desc="Requests", disable=args.disable_tqdm) as bar:
        start = asyncio.get_running_loop().time()
        complete = await send_sessions(
            client, exchanges, due, max_concurrency=args.max_concurrency, on_finished=bar.update
        )
        return Measurement(timelines, asyncio.get_running_loop().time() - start, complete)


def _warmups(sessions: Sequence[Session], count: int) -> list[Session]:
    """Return requests as long as the first ones that leave nothing for them in a prefix cache."""
    warmups: list[Session] = []
    for index in range(count):
        turn = sessions[index % len(sessions)][0]
        content = turn.content
        if isinstance(content, tuple):
            content = ((f"warm-up-{index}", turn.num_tokens),)
        warmups.append([Turn(content, turn.output_len)])
    return warmups


def result_of(
    args: argparse.Namespace, measurement: Measurement, *, percentiles: Sequence[float] = ()
) -> dict[str, Any]:
    """Return all figures; rates count what succeeded, which must be something.

    `percentiles` are in it beside those that always are.
    """
    timelines, done, seconds = measurement.timelines, measurement.done, measurement.seconds
    num_input = sum(timeline.num_prompt_tokens for timeline in done)
    num_output = sum(timeline.num_output_tokens for timeline in done)
    failed = sum(timeline.error is not None for timeline in timelines)
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        **dict(args.metadata),
        "model_id": args.model,
        "base_url": args.base_url,
        "endpoint": args.endpoint,
        "num_prompts": args.num_prompts,
        "request_rate": _finite(args.request_rate),
        "burstiness": _finite(args.burstiness),
        "ramp_up_strategy": args.ramp_up_strategy,
        "ramp_up_start_rps": args.ramp_up_start_rps,
        "ramp_up_end_rps": args.ramp_up_end_rps,
        "max_concurrency": args.max_concurrency,
        "duration": seconds,
        "completed": len(done),
        "failed": failed,
        "interrupted": len(timelines) - len(done) - failed,
        "error_rate": failed / (len(done) + failed),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": cached_tokens(done),
        "request_throughput": len(done) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        **goodput_fields(args, done, seconds),
        "max_output_tokens_per_s": peak_tokens_per_second(done),
        "max_concurrent_requests": peak_concurrency(done),
        **latency_fields(done, percentiles),
        "settings": dataset_settings(args)
        | {
            name: getattr(args, name)
            for name in (
                "vocab_size", "num_warmups", "ignore_eos", "temperature", "top_p", "top_k",
                "extra_body", "lora_modules", "lora_assignment",
            )
        },
        "versions": versions(),
    }  # fmt: skip


def goodput_fields(
    args: argparse.Namespace, done: Sequence[Timeline], seconds: float
) -> dict[str, Any]:
    """Return the requests per second that keep the objectives; None where there are none."""
    objectives = dict(args.goodput)
    good = sum(meets(timeline, objectives) for timeline in done)
    return {
        "goodput_objectives_ms": objectives,
        "good_completed": good if objectives else None,
        "request_goodput": good / seconds if objectives else None,
    }


def lines_of(result: dict[str, Any]) -> dict[str, object]:
    """Return the figures that are printed, by name."""
    rate = result["request_rate"]
    if result["ramp_up_strategy"] is not None:
        rate = f"{result['ramp_up_start_rps']:g} to {result['ramp_up_end_rps']:g}"
    lines: dict[str, object] = {
        "Successful requests": result["completed"],
        "Failed requests": result["failed"],
        "Error rate (%)": 100 * result["error_rate"],
        "Request rate configured (RPS)": rate,
        "Maximum request concurrency": result["max_concurrency"],
        "Benchmark duration (s)": result["duration"],
        "Total input tokens": result["total_input_tokens"],
        "Total cached input tokens": result["total_cached_tokens"],
        "Total generated tokens": result["total_output_tokens"],
        "Request throughput (req/s)": result["request_throughput"],
        "Request goodput (req/s)": result["request_goodput"],
        "Output token throughput (tok/s)": result["output_throughput"],
        "Peak output tokens of a second": result["max_output_tokens_per_s"],
        "Peak concurrent requests": result["max_concurrent_requests"],
        "Total token throughput (tok/s)": result["total_token_throughput"],
    }
    return {name: value for name, value in lines.items() if value is not None}


def detailed_fields(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return what every request did, in vLLM's lists: seconds, and 0 where nothing came."""
    start = min((timeline.sent for timeline in timelines if timeline.sent), default=0.0)
    return {
        "input_lens": [timeline.num_prompt_tokens for timeline in timelines],
        "output_lens": [timeline.num_output_tokens for timeline in timelines],
        "cached_lens": [timeline.num_cached_tokens for timeline in timelines],
        "start_times": [max(0.0, timeline.sent - start) for timeline in timelines],
        "ttfts": [timeline.ttft if timeline.arrivals else 0.0 for timeline in timelines],
        "itls": [timeline.itls for timeline in timelines],
        "latencies": [timeline.e2el if timeline.arrivals else 0.0 for timeline in timelines],
        "request_ids": [timeline.request_id for timeline in timelines],
        "errors": [timeline.error or "" for timeline in timelines],
    }


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(value) else value
