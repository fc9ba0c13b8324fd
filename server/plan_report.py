"""A plan as text: what a person reads before renting a GPU."""

import dataclasses
import textwrap
from collections.abc import Sequence

from paged.scheduler.capacity import GIB
from paged.scheduler.planning.advice import Suggestion
from paged.scheduler.planning.fit import Fit
from paged.scheduler.planning.plan import GPUPlan, Plan
from paged.scheduler.planning.speed import Speed
from paged.scheduler.simulator.model_presets import MODELS
from paged.server.plan_json import batches, prompts
from paged.server.text_table import aligned

_KIB, _MIB = 2**10, 2**20
# The column that marks what is predicted below.
_CHOSEN = "chosen"


def plan_text(plan: Plan) -> str:
    """Return the whole report; of several GPUs a line each."""
    parts = [_model(plan)]
    parts += [_comparison(plan)] if len(plan.gpus) > 1 else _details(plan, plan.gpus[0])
    return "\n\n".join([*parts, _assumptions(plan)])


def _model(plan: Plan) -> str:
    model, size, workload = plan.model, plan.size, plan.settings.workload
    heads = f"{model.num_q_heads} query and {model.num_kv_heads} KV heads of {model.head_dim}"
    if model.latent is not None:
        vector = f"{model.latent.kv_rank} + {model.latent.rope_dim}"
        heads = f"{model.num_q_heads} heads, one latent vector of {vector} per token"
    parameters = f"{_billions(size.total)} parameters"
    if size.unused:
        parameters += f", {_billions(size.active)} active per token"
    per_token = f"{plan.bytes_per_token / _KIB:g} KiB per token in {plan.kv_cache_dtype}"
    total = _size(workload.total_len * plan.bytes_per_token)
    request = f"{workload.input_len:,} in + {workload.output_len:,} out"
    if workload.shared_prefix_len:
        request += f", the first {workload.shared_prefix_len:,} shared by all"
    lines = {
        "Model": f"{plan.name}, {parameters}",
        "Shape": f"{model.architecture}, {model.num_layers} layers, {heads}",
        "KV cache": f"{per_token}: {total} for a request of {workload.total_len:,} tokens",
        "Workload": request,
    }
    windowed = sum(window is not None for window in model.layer_windows)
    if windowed:
        lines["Windows"] = f"{windowed} of {model.num_layers} layers keep a sliding window only"
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())


def _comparison(plan: Plan) -> str:
    rows = [_comparison_row(one) for one in plan.gpus]
    text = aligned(rows)
    return (
        f"{text}\n\nridge: FLOP/byte. GiB: of each GPU. knee: requests. TTFT, tok/s: predicted; "
        f"of all: as many\nrequests as fit, prefills included. More about one: paged plan "
        f"{plan.name} --gpu NAME"
    )


def _comparison_row(plan: GPUPlan) -> dict[str, str]:
    gpu, speed = plan.gpu, plan.chosen
    row = {"GPU": gpu.name, "GiB": f"{gpu.memory_bytes / GIB:.0f}", "ridge": f"{gpu.ridge:.0f}"}
    if speed is None:
        return row | {"GPUs": "-", "weights": "does not fit"}
    return row | _fit_cells(speed.fit, plan) | _speed_cells(speed)


def _speed_cells(speed: Speed) -> dict[str, str]:
    most = speed.largest_batch
    return {
        "knee": f"{speed.knee().batch:,}",
        "TTFT ms": _ms(speed.prefill().seconds),
        "tok/s of 1": f"{speed.decode(1).tokens_per_second:,.0f}",
        "of all": f"{speed.output_tokens_per_second(most):,.0f}",
    }


def _details(plan: Plan, gpu_plan: GPUPlan) -> list[str]:
    gpu = gpu_plan.gpu
    heading = (
        f"{gpu.name}: {gpu.memory_bytes / GIB:.1f} GiB, {gpu.bytes_per_second / 1e9:,.0f} GB/s, "
        f"{gpu.bf16_flops / 1e12:,.4g} TFLOP/s dense in 16 bits; ridge point "
        f"{gpu.ridge:.0f} FLOP/byte"
    )
    parts = [heading, f"WHAT FITS\n{_fits(gpu_plan)}"]
    if gpu_plan.chosen is None:
        where = max(one.num_gpus for one in gpu_plan.fits)
        return [
            *parts,
            f"Not one request of {plan.settings.workload.total_len:,} tokens fits on {where} of "
            "these GPUs: take larger ones, more of them (--tensor-parallel-size), fewer bits "
            "(--quantization, --kv-cache-dtype) or shorter requests.",
        ]
    return [
        *parts,
        _prefills(gpu_plan.chosen),
        _decodes(gpu_plan.chosen),
        _suggestions(plan.name, gpu_plan.suggestions),
    ]


def _suggestions(model: str, suggestions: Sequence[Suggestion]) -> str:
    lines = []
    for one in suggestions:
        lines.append(f"{one.flag} {one.value}" + ("  (a trade, not taken here)" * one.is_trade))
        lines += textwrap.wrap(one.reason, 96, initial_indent="    ", subsequent_indent="    ")
    flags = [f"{one.flag} {one.value}" for one in suggestions if not one.is_trade]
    # The engine does not know the short names of shapes.
    served = "MODEL" if model.lower() in MODELS else model
    command = " \\\n    ".join([f"paged serve {served}", *flags])
    return "\n".join(["SUGGESTED FLAGS", *lines, "", command])


def _fits(plan: GPUPlan) -> str:
    """Return a row for each number of GPUs and precision; caches of both types side by side."""
    rows: dict[tuple[int, str], dict[str, str]] = {}
    for fit in plan.fits:
        row = rows.setdefault((fit.num_gpus, fit.weights_name), _placement_cells(fit))
        held = fit.requests(fit.config.max_model_len or 0)
        tokens = fit.kv_tokens(fit.config.max_model_len or 0)
        row[f"tokens {fit.kv_name}"] = f"{tokens:,}" if held else "-"
        row[f"requests {fit.kv_name}"] = f"{held:,}" if held else "-"
        if plan.chosen is not None and fit.kv_name == plan.chosen.fit.kv_name:
            speed = dataclasses.replace(plan.chosen, fit=fit)
            row["tok/s of 1"] = f"{speed.decode(1).tokens_per_second:,.0f}" if held else "-"
    if plan.chosen is not None:
        chosen = plan.chosen.fit
        rows[chosen.num_gpus, chosen.weights_name][_CHOSEN] = "*"
    return aligned([row | {_CHOSEN: row.pop(_CHOSEN, "")} for row in rows.values()])


def _placement_cells(fit: Fit) -> dict[str, str]:
    return {
        "GPUs": str(fit.num_gpus),
        "weights": fit.weights_name,
        "GiB each": f"{fit.weights.total / GIB:.2f}",
        "KV GiB each": f"{fit.kv_bytes / GIB:.2f}" if fit.num_blocks else "-",
    }


def _fit_cells(fit: Fit, plan: GPUPlan) -> dict[str, str]:
    length = fit.config.max_model_len or 0
    return _placement_cells(fit) | {
        "KV tokens": f"{fit.kv_tokens(length):,}",
        "requests": f"{fit.requests(length):,}",
    }


def _prefills(speed: Speed) -> str:
    rows = []
    first, cached = speed.prefill(), speed.cached_len
    for name, prefill in [
        (f"{first.num_tokens:,}" + (f" (+{cached:,} cached)" if cached else " (workload)"), first),
        *((f"{length:,}", speed.prefill(length)) for length in prompts(speed)),
    ]:
        rows.append(
            {
                "tokens": name,
                "ms to the first token": _ms(prefill.seconds),
                "tok/s": f"{prefill.tokens_per_second:,.0f}",
            }
        )
    return f"PREFILL of one prompt alone, {_on(speed)}\n{aligned(rows)}"


def _decodes(speed: Speed) -> str:
    knee, rows = speed.knee(), []
    for batch in batches(speed):
        decode = speed.decode(batch)
        rows.append(
            {
                "batch": f"{batch:,}" + (" knee" if batch == knee.batch else ""),
                "ms per token": _ms(decode.seconds),
                "tok/s of each": f"{1 / decode.seconds:,.0f}",
                "of all": f"{decode.tokens_per_second:,.0f}",
                "with prefills": f"{speed.output_tokens_per_second(batch):,.0f}",
                "limited by": decode.bound,
            }
        )
    title = f"DECODE at {speed.workload.mean_context:,} tokens of context, {_on(speed)}"
    reached = "" if knee.batch <= speed.largest_batch else "; more than run at once here"
    why = (
        "from there on arithmetic is the limit, and more requests add nothing"
        if knee.reason == "arithmetic"
        else "from there on a step reads more KV cache than weights, and more requests add little"
    )
    return f"{title}\n{aligned(rows)}\nKnee at {knee.batch:,} requests{reached}: {why}."


def _on(speed: Speed) -> str:
    fit = speed.fit
    return f"{speed.roofline.name}, {fit.weights_name} weights, {fit.kv_name} KV cache"


def _assumptions(plan: Plan) -> str:
    assumed = plan.settings.efficiencies
    return (
        "Times are rooflines of data-sheet figures, not measurements: they assume that a step "
        f"reaches\n{assumed.compute_efficiency:.0%} of the arithmetic and "
        f"{assumed.memory_efficiency:.0%} of the bandwidth, and "
        f"{1000 * assumed.step_overhead_seconds:g} ms of overhead. Sizes are what the engine "
        f"allocates\nin {plan.settings.gpu_memory_utilization:.0%} of a GPU that nothing else uses."
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.4g} M"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.4f} GiB" if num_bytes > 8 * _MIB else f"{num_bytes / _KIB:,.4g} KiB"


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.1f}" if milliseconds < 100 else f"{milliseconds:,.0f}"
