"""`paged plan`: what a model needs of a GPU and what to expect of it, before either is there."""

import argparse
import json
from collections.abc import Sequence

from paged.scheduler.planning.plan import PlanSettings, make_plan
from paged.scheduler.planning.speed import Efficiencies
from paged.scheduler.planning.workload import Workload
from paged.scheduler.simulator.gpus import GPU, GPUS, gpu_of_figures
from paged.scheduler.simulator.model_presets import find_model
from paged.server.cli_errors import user_errors
from paged.server.plan_json import plan_fields
from paged.server.plan_report import plan_text


def run(args: argparse.Namespace) -> int:
    """Print the plan and return 0.

    Raises: UserError for a model that is not there or not implemented, an unknown GPU, and
      options that contradict each other.
    """
    with user_errors():
        model = find_model(args.model, revision=args.revision, token=args.hf_token)
        plan = make_plan(args.model, model, gpus_of(args), settings_of(args))
    print(json.dumps(plan_fields(plan)) if args.json else plan_text(plan))
    return 0


def gpus_of(args: argparse.Namespace) -> Sequence[GPU]:
    """Return the GPUs that are named or described; all, if none is.

    Raises: ValueError for an unknown name or a missing figure.
    """
    figures = {
        "memory_gib": args.gpu_memory,
        "gb_per_second": args.bandwidth,
        "tflops": args.tflops,
        "link_gb_per_second": args.link_bandwidth,
    }
    if args.gpu is None and all(value is None for value in figures.values()):
        return list(GPUS.values())
    return [gpu_of_figures(name, **figures) for name in args.gpu or [None]]


def settings_of(args: argparse.Namespace) -> PlanSettings:
    """Return what is asked.

    Raises: ValueError if it contradicts itself.
    """
    return PlanSettings(
        workload=Workload(args.input_len, args.output_len, args.shared_prefix_len),
        efficiencies=Efficiencies(
            args.compute_efficiency, args.memory_efficiency, args.step_overhead / 1000
        ),
        tensor_parallel_size=args.tensor_parallel_size,
        quantization=args.quantization,
        kv_cache_dtype=None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )
