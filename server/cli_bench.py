"""`paged bench`: picks the benchmark, and what those that run an engine here have in common."""

import argparse
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paged.scheduler.config import EngineConfig
from paged.server.cli_settings import models_cache_dir

if TYPE_CHECKING:
    from paged.scheduler.loading import LoadedEngine

# Benchmark -> module with `run(args) -> int`.
_BENCHMARKS = {
    "throughput": "paged.server.cli_bench_throughput",
    "latency": "paged.server.cli_bench_latency",
    "serve": "paged.server.cli_bench_serve",
    "sweep": "paged.server.cli_bench_sweep",
    "compare": "paged.server.cli_bench_compare",
}


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark and return its exit status.

    Raises: UserError for what the user can mend.
    """
    benchmark = importlib.import_module(_BENCHMARKS[args.bench])
    status: int = benchmark.run(args)
    return status


@contextlib.contextmanager
def loaded_engine(args: argparse.Namespace, config: EngineConfig) -> Iterator["LoadedEngine"]:
    """Yield an engine of the model that the command line names; close it at the end.

    Raises: what `load_engine` raises.
    """
    # Imported here: JAX takes seconds, and a mistake in the options should show before.
    from paged.scheduler.loading import load_engine

    print(f"Loading {args.model or 'the demo model'} ...", file=sys.stderr)
    loaded = load_engine(
        args.model,
        config,
        progress=sys.stderr.isatty(),
        revision=args.revision,
        token=args.hf_token,
        models_cache_dir=models_cache_dir(),
    )
    try:
        yield loaded
    finally:
        loaded.engine.close()


def settings_of(args: argparse.Namespace, loaded: "LoadedEngine", *names: str) -> dict[str, Any]:
    """Return the options of these names, the model and the engine's settings, all resolved."""
    from paged.backends import current_platform

    return {
        **{name: getattr(args, name) for name in names},
        "model": loaded.checkpoint.name,
        "platform": current_platform(),
        "max_model_len": loaded.max_model_len,
        "engine": dataclasses.asdict(loaded.config),
    }
