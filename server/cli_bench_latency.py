"""`paged bench latency`: one batch after the other through an engine in this process."""

import argparse
import dataclasses

import numpy as np
from tqdm import tqdm

from paged.server.bench_datasets import Turn
from paged.server.bench_page import run_page
from paged.server.bench_prompts import longest, random_lengths
from paged.server.bench_report import (
    check_writable,
    print_report,
    versions,
    write_json,
    write_text,
)
from paged.server.bench_timeline import Timeline, latency_fields
from paged.server.cli_bench import loaded_engine, settings_of
from paged.server.cli_bench_throughput import fitted, requests_of
from paged.server.cli_errors import user_errors
from paged.server.cli_settings import engine_config, set_up_logging

# Those that vLLM reports.
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the result; return 0.

    Raises: UserError if the model cannot be loaded, the requests not be served or the file not be
      written.
    """
    set_up_logging(args.log_level)
    check_writable(args.json)
    check_writable(args.html)
    timelines: list[Timeline] = []
    latencies: list[float] = []
    with user_errors():
        config = fitted(engine_config(args), _longest(args))
        if config.max_num_seqs is None:
            config = dataclasses.replace(config, max_num_seqs=args.batch_size)
        with loaded_engine(args, config) as loaded:
            run_once = requests_of(args.seed, loaded, _batch(args))
            for _ in tqdm(range(args.num_iters_warmup), desc="Warm-up", disable=args.disable_tqdm):
                run_once()
            for _ in tqdm(range(args.num_iters), desc="Batches", disable=args.disable_tqdm):
                batch, _ = run_once()
                timelines += batch
                latencies.append(max(timeline.e2el for timeline in batch))
            settings = settings_of(
                args, loaded, "batch_size", "num_iters", "num_iters_warmup", "random_input_len",
                "random_output_len", "random_range_ratio", "seed",
            )  # fmt: skip
    values = np.percentile(latencies, _PERCENTILES).tolist()
    percentiles = {str(percent): v for percent, v in zip(_PERCENTILES, values, strict=True)}
    average = float(np.mean(latencies))
    lines: dict[str, object] = {
        "Batches": args.num_iters,
        "Requests per batch": args.batch_size,
        "Mean latency of a batch (ms)": 1e3 * average,
    }
    lines |= {
        f"p{name} latency of a batch (ms)": 1e3 * value for name, value in percentiles.items()
    }
    print_report("Latency", lines, timelines)
    result = {
        **dict(args.metadata),
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": percentiles,
        **latency_fields(timelines),
        "settings": settings,
        "versions": versions(),
    }
    write_json(args.json, result)
    title = f"{settings['model']}, one batch at a time"
    write_text(args.html, lambda: run_page(title, lines, result, timelines))
    return 0


def _longest(args: argparse.Namespace) -> int:
    lengths = (args.random_input_len, args.random_output_len)
    return sum(longest(mean, args.random_range_ratio) for mean in lengths)


def _batch(args: argparse.Namespace) -> list[list[Turn]]:
    rng = np.random.default_rng(args.seed)
    count, share = args.batch_size, args.random_range_ratio
    input_lens = random_lengths(rng, count, args.random_input_len, share)
    output_lens = random_lengths(rng, count, args.random_output_len, share)
    lengths = enumerate(zip(input_lens, output_lens, strict=True))
    return [[Turn(((index, length),), output_len)] for index, (length, output_len) in lengths]
