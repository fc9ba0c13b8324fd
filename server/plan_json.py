"""A plan as JSON: bytes and seconds, nothing rounded."""

import dataclasses
from typing import Any

from paged.scheduler.planning.fit import Fit
from paged.scheduler.planning.plan import GPUPlan, Plan
from paged.scheduler.planning.speed import Decode, Prefill, Speed

# Prompts whose prefill is predicted, beside the workload's.
PROMPTS = (512, 2048, 8192, 32768)


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON object."""
    model, workload = plan.model, plan.settings.workload
    return {
        "model": {
            "name": plan.name,
            "architecture": model.architecture,
            "parameters": plan.size.total,
            "active_parameters": plan.size.active,
            "num_layers": model.num_layers,
            "num_q_heads": model.num_q_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.max_position_embeddings,
        },
        "bytes_per_token": plan.bytes_per_token,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "workload": dataclasses.asdict(workload)
        | {"kv_bytes_per_request": workload.total_len * plan.bytes_per_token},
        "assumptions": dataclasses.asdict(plan.settings.efficiencies)
        | {
            "gpu_memory_utilization": plan.settings.gpu_memory_utilization,
            "method": "roofline of data-sheet figures; not a measurement",
        },
        "gpus": [_gpu(one) for one in plan.gpus],
    }


def prompts(speed: Speed) -> list[int]:
    """Return lengths of prompts that the model takes and the cache holds."""
    longest = speed.fit.longest_request(speed.model.max_position_embeddings)
    return [length for length in PROMPTS if length <= longest]


def batches(speed: Speed) -> list[int]:
    """Return batch sizes: powers of two, the knee, and the most that run at once."""
    most = speed.largest_batch
    powers = {2**i for i in range(most.bit_length())}
    return sorted(powers | {most} | ({speed.knee().batch} if speed.knee().batch <= most else set()))


def _gpu(plan: GPUPlan) -> dict[str, Any]:
    figures = dataclasses.asdict(plan.gpu) | {"ridge_flop_per_byte": plan.gpu.ridge}
    fields: dict[str, Any] = figures | {
        "placements": [_fit(one, plan) for one in plan.fits],
        "chosen": None,
        "suggestions": [dataclasses.asdict(one) for one in plan.suggestions],
    }
    if plan.chosen is not None:
        fields["chosen"] = _speed(plan.chosen)
    return fields


def _fit(fit: Fit, plan: GPUPlan) -> dict[str, Any]:
    workload = fit.config.max_model_len
    assert workload is not None, "the fit is for a workload"
    return {
        "tensor_parallel_size": fit.num_gpus,
        "weights": fit.weights_name,
        "kv_cache_dtype": fit.kv_name,
        "weight_bytes_per_gpu": fit.weights.total,
        "activation_bytes_per_gpu": fit.budget.activation_bytes,
        "kv_bytes_per_gpu": fit.kv_bytes,
        "kv_bytes_per_token_per_gpu": fit.spec.bytes_per_token * len(fit.groups),
        "num_blocks": fit.num_blocks,
        "kv_tokens": fit.kv_tokens(workload),
        "concurrency": fit.requests(workload),
        "is_chosen": plan.chosen is not None and plan.chosen.fit is fit,
    }


def _speed(speed: Speed) -> dict[str, Any]:
    knee, most = speed.knee(), speed.largest_batch
    return {
        "tensor_parallel_size": speed.fit.num_gpus,
        "weights": speed.fit.weights_name,
        "kv_cache_dtype": speed.fit.kv_name,
        "ttft_seconds": speed.prefill().seconds,
        "prefill": [_prefill(speed.prefill(length)) for length in prompts(speed)],
        "decode": [_decode(speed.decode(batch), speed) for batch in batches(speed)],
        "knee": dataclasses.asdict(knee) | {"reason": knee.reason},
        "max_batch": most,
        "output_tokens_per_second": speed.output_tokens_per_second(most),
    }


def _prefill(prefill: Prefill) -> dict[str, Any]:
    return dataclasses.asdict(prefill) | {"tokens_per_second": prefill.tokens_per_second}


def _decode(decode: Decode, speed: Speed) -> dict[str, Any]:
    return dataclasses.asdict(decode) | {
        "tokens_per_second": decode.tokens_per_second,
        "output_tokens_per_second": speed.output_tokens_per_second(decode.batch),
    }
