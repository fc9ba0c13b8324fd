# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does a plan hold what it promises?
#
# `paged plan` predicts times from three figures of a device: memory, bandwidth, arithmetic. Here
# the device is the CPU that this notebook runs on. Two figures are measured in a second; the plan
# of the demo model follows from them; then the engine serves the same load, as `paged bench` does,
# and both are drawn together. Times differ from machine to machine, so that only figures show them.

# %%
import os

import numpy as np

import figures
from paged.scheduler.capacity import GIB
from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import load_engine
from paged.scheduler.planning.host_rates import measure_host
from paged.scheduler.planning.plan import PlanSettings, make_plan
from paged.scheduler.planning.speed import Efficiencies, Speed
from paged.scheduler.planning.workload import Workload
from paged.scheduler.simulator.gpus import gpu_of_figures
from paged.scheduler.simulator.model_presets import find_model
from paged.server.bench_engine import run_requests, usable_token_ids
from paged.server.bench_prompts import random_tokens

MODEL = "smollm2-135m"  # the shape of the demo model
WORKLOAD = Workload(input_len=128, output_len=24)
BATCHES = [1, 2, 4, 8, 16]
PROMPTS = [64, 128, 256, 512]
MEMORY_GIB = 4  # of the plan; the engine takes at most 2 GiB of a CPU's memory for KV


# %% [markdown]
# ## Two figures of this machine
#
# Bandwidth: the weights that a product with one row reads, more than any cache holds. Arithmetic: a
# product with many rows. Both are taken with the product that the engine uses (here the native one,
# where there is a compiler, in the type of the weights): another one would be no bound for it. They
# are what the machine does, not what its data sheet says, so the plan assumes no further losses:
# its two efficiencies are 1, and steps have no overhead. What the engine lacks is then its own.

# %%
loaded = load_engine(
    None,
    EngineConfig(
        max_model_len=1024, max_num_seqs=max(BATCHES), max_num_batched_tokens=max(PROMPTS)
    ),
    progress=False,
    models_cache_dir=os.environ.get("PAGED_MODELS_CACHE"),
)
rates = measure_host(loaded.config.linear_backend, loaded.config.dtype)
gb_per_second = rates.gb_per_second

machine = gpu_of_figures(memory_gib=MEMORY_GIB, gb_per_second=gb_per_second, tflops=rates.tflops)
settings = PlanSettings(
    workload=WORKLOAD,
    efficiencies=Efficiencies(1.0, 1.0, 0.0),
    tensor_parallel_size=1,
    max_num_seqs=max(BATCHES),
    max_num_batched_tokens=max(PROMPTS),
)
plan = make_plan(MODEL, find_model(MODEL), [machine], settings)
speed = plan.gpus[0].chosen
assert isinstance(speed, Speed)
weights_gib = speed.fit.weights.total / GIB
print(f"{plan.size.total:,} parameters: {weights_gib:.3f} GiB in bfloat16")
print(f"{plan.bytes_per_token:,} bytes of KV per token")
print(f"{WORKLOAD.total_len * plan.bytes_per_token / GIB:.4f} GiB of KV per request")

# %% [markdown]
# ## The same load on the engine
#
# Random prompts, greedy, past the end of a text. The time of a step is the median gap between the
# tokens of the first request, in the second half of its answer, when all requests decode. The time
# of a prefill is that of a request alone until its first token.

# %%
engine, rng = loaded.engine, np.random.default_rng(0)
token_ids = usable_token_ids(engine, plan.model.vocab_size)


def serve(num_requests: int, prompt_len: int, output_len: int):
    """Serve random requests, all there at the start; return their timelines."""
    prompts = random_tokens(rng, [prompt_len] * num_requests, token_ids)
    timelines, _ = run_requests(engine, prompts, [output_len] * num_requests)
    return timelines


def step_seconds(batch: int) -> float:
    """Return the time of a step in which `batch` requests decode."""
    first, *_ = serve(batch, WORKLOAD.input_len, WORKLOAD.output_len)
    gaps = np.diff(first.arrivals)
    return float(np.median(gaps[len(gaps) // 2 :]))


def prefill_seconds(prompt_len: int) -> float:
    """Return the time to the first token of a request alone."""
    times = [one.arrivals[0] - one.sent for _ in range(3) for one in serve(1, prompt_len, 1)]
    return min(times)


serve(2, 64, 4)  # what a first run loads is not measured
seen_steps = [step_seconds(batch) for batch in BATCHES]
seen_prefills = [prefill_seconds(length) for length in PROMPTS]
planned_steps = [speed.decode(batch).seconds for batch in BATCHES]
planned_prefills = [speed.prefill(length).seconds for length in PROMPTS]
kv_blocks_match = loaded.config.block_size == speed.fit.config.block_size

# %% [markdown]
# ## Decode: a plan is what would be without losses
#
# Points are the engine, lines the plan. While a step only reads weights, a larger batch takes no
# longer, so tokens per second grow with it; on a CPU, whose ridge is low, arithmetic takes over
# after a few requests.


# %%
def draw(axes, x, planned, seen, unit: str) -> None:
    """Draw plan and engine over x."""
    axes.loglog(x, planned, color=figures.GREY)
    axes.loglog(x, seen, "o", color=figures.BLUE, markersize=8)
    figures.label(axes, x[-1], planned[-1], "plan", figures.GREY)
    figures.label(axes, x[-1], seen[-1], "engine", figures.BLUE, offset=(8, 0))
    axes.set_xticks(x, [str(value) for value in x])
    axes.minorticks_off()
    axes.set_ylabel(unit)


figure, (left, right) = figures.new_figure(1, 2, size=(11, 3.8))
draw(left, BATCHES, [1e3 * s for s in planned_steps], [1e3 * s for s in seen_steps], "ms")
left.set(xlabel="requests decoding in a step")
left.set_title("Time of a step")
tokens_per_second = [
    [b / s for b, s in zip(BATCHES, steps, strict=True)] for steps in (planned_steps, seen_steps)
]
draw(right, BATCHES, *tokens_per_second, "tokens per second")
right.set(xlabel="requests decoding in a step")
right.set_title("Tokens of all requests")
figures.headline(figure, "Decode of the demo model on this CPU, as planned and as seen")

# %% [markdown]
# ## Prefill: arithmetic from the first hundred tokens on

# %%
figure, axes = figures.new_figure(size=(8, 3.8))
draw(
    axes, PROMPTS, [1e3 * s for s in planned_prefills], [1e3 * s for s in seen_prefills],
    "ms to the first token",
)  # fmt: skip
axes.set(xlabel="tokens of the prompt")
figures.headline(axes, "Prefill grows with the prompt, as planned and as seen")

# %% [markdown]
# ## The share that is reached is what to plan with
#
# Predicted over seen, for each load. This is the number to give `paged plan` the next time, as
# `--memory-efficiency` (the left bars) and `--compute-efficiency` (the right ones): then the plan
# answers for other lengths and batches. A share above 1 would say that the machine had
# something else to do while it was measured: what is planned is a bound.

# %%
shares = [
    [plan_s / seen_s for plan_s, seen_s in zip(planned, seen, strict=True)]
    for planned, seen in ((planned_steps, seen_steps), (planned_prefills, seen_prefills))
]
figure, (left, right) = figures.new_figure(1, 2, size=(11, 3.4), sharey=True)
for axes, x, share, color, name in [
    (left, BATCHES, shares[0], figures.BLUE, "requests decoding in a step"),
    (right, PROMPTS, shares[1], figures.RED, "tokens of the prompt"),
]:
    axes.bar([str(value) for value in x], share, color=color)
    axes.axhline(1, color=figures.GREY, linestyle=":", linewidth=1.5)
    axes.set(xlabel=name)
left.set(ylabel="predicted time / seen time")
figures.headline(figure, f"The share of the roofline that the engine reaches ({rates.product})")
