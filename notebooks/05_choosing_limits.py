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
# # How should `max_num_seqs` and `max_num_batched_tokens` be chosen?
#
# Llama 3.1 8B on an RTX 4090, by the simulator: 16 GB of weights leave room for 52,000 tokens of
# cache. Prompts of 500 and answers of 400 tokens on average, of very different lengths. Put your
# own GPU, model and lengths into the next cell.

# %%
import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

import figures
from paged.scheduler.simulator.arrivals import LengthDistribution, sharegpt
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.gpus import find_gpu
from paged.scheduler.simulator.model_presets import find_model
from paged.scheduler.simulator.result import SimulationResult
from paged.scheduler.simulator.roofline import Roofline
from paged.scheduler.simulator.simulate import simulate
from paged.scheduler.simulator.step_cost import StepLoad

MODEL, GPU = "llama-3.1-8b", "rtx-4090"
PROMPT = LengthDistribution(500, 1.0, maximum=4096)
OUTPUT = LengthDistribution(400, 0.8, maximum=2048)
NUM_REQUESTS = 300  # of each run; more make the curves smoother
MAX_NUM_SEQS = [8, 16, 24, 32, 48, 64, 80, 96, 128]
REQUEST_RATES = {1.0: figures.GREEN, 2.0: figures.BLUE, 3.0: figures.RED}  # per second
TRADED_SEQS = [16, 32, 48, 64]
TRADED_BUDGETS = {256: figures.GREEN, 1024: figures.BLUE, 4096: figures.RED}
BUDGETS = [128, 256, 512, 1024, 2048, 4096]
NUM_DECODES = 32  # beside a full step, in the last figure

cost = Roofline(find_gpu(GPU), find_model(MODEL))
base = SimulationConfig(cost.num_blocks(), max_num_seqs=64, enable_prefix_caching=False)
pool_tokens = (base.num_blocks - 1) * base.block_size


def serve(request_rate: float, **limits: int) -> SimulationResult:
    """The same requests under other limits; an infinite rate lets all of them queue at once."""
    trace = sharegpt(NUM_REQUESTS, request_rate, prompt=PROMPT, output=OUTPUT)
    return simulate(trace, dataclasses.replace(base, **limits), cost)


# %% [markdown]
# ## How many requests does the pool hold?
#
# A request holds its prompt from its first step to its last, and half of its answer on average.
# Long answers stay longer, so they count by their length. The tokens of a running request are
#
#     mean(output * (prompt + output / 2)) / mean(output)
#
# and the pool divided by that is the number of requests it can hold, **the dotted line below**.

# %%
lengths = [
    (request.prompt_tokens, request.output_tokens)
    for request in sharegpt(NUM_REQUESTS, prompt=PROMPT, output=OUTPUT)
]
held_tokens = sum(o * (p + o / 2) for p, o in lengths) / sum(o for _, o in lengths)
pool_holds = pool_tokens / held_tokens
print(f"{pool_tokens:,} tokens of KV / {held_tokens:.0f} per running request = {pool_holds:.0f}")

# %% [markdown]
# ## More requests at once: throughput, until the pool is full
#
# Here the queue is never empty. A *row* is a running request. Up to the dotted line every further
# row adds throughput, because the weights are read once for all of them. Beyond it the pool is
# full: requests are preempted, their work is done again, and throughput *falls*.

# %%
saturated = {n: serve(float("inf"), max_num_seqs=n) for n in MAX_NUM_SEQS}
runs = list(saturated.values())
throughput = [run.per_second(run.totals.output_tokens) for run in runs]
recomputed = [100 * run.totals.recomputed_tokens / run.totals.computed_tokens for run in runs]
preemptions = [run.totals.num_preemptions for run in runs]
best_num_seqs = MAX_NUM_SEQS[int(np.argmax(throughput))]

figure, grid = figures.new_figure(2, 2, size=(11, 6.4), sharex=True)
panels = [
    (grid[0, 0], "output tokens per second", "Throughput peaks where the pool is full"),
    (grid[0, 1], "milliseconds", "Gaps between tokens grow with the batch"),
    (grid[1, 0], "KV blocks in use, %", "The pool fills up"),
    (grid[1, 1], "% of all computed tokens", "Work thrown away by preemption"),
]
for axes, unit, title in panels:
    axes.axvline(pool_holds, color=figures.GREY, linewidth=1.2, linestyle=":")
    axes.set(ylabel=unit, xlim=(0, MAX_NUM_SEQS[-1] + 14))
    axes.set_title(title)
for axes in grid[1]:
    axes.set_xlabel("max_num_seqs")


def line(axes: Axes, values: Sequence[float], color: str, name: str = "") -> None:
    """Draw a value by max_num_seqs with its name at the end."""
    axes.plot(MAX_NUM_SEQS, values, "o-", color=color)
    figures.label(axes, MAX_NUM_SEQS[-1], values[-1], name, color)


line(grid[0, 0], throughput, figures.BLUE)
for name, color in [("p50", figures.BLUE), ("p99", figures.RED)]:
    line(grid[0, 1], [1000 * getattr(run.latency("itl"), name) for run in runs], color, name)
used = [run.steps.column("used_blocks") / run.steps.num_usable_blocks for run in runs]
line(grid[1, 0], [100 * u.max() for u in used], figures.RED, "peak")
line(grid[1, 0], [100 * run.steps.mean_usage() for run in runs], figures.BLUE, "mean")
line(grid[1, 1], recomputed, figures.PURPLE)
figures.label(grid[0, 0], pool_holds, 250, "what the pool holds", figures.GREY)
at = MAX_NUM_SEQS.index(best_num_seqs)
figures.label(
    grid[1, 1],
    best_num_seqs,
    recomputed[at],
    f"{preemptions[at]} preemptions",
    figures.PURPLE,
    offset=(-10, 4),
    align="right",
)
figures.label(
    grid[1, 1],
    MAX_NUM_SEQS[-1],
    0.8 * recomputed[-1],
    f"{preemptions[-1]} preemptions",
    figures.PURPLE,
    offset=(0, 0),
    align="right",
)
for axes, _, _ in panels:
    axes.set_ylim(bottom=0)
figures.headline(
    figure, "More running requests help until the pool is full; preemption eats the rest"
)

# %% [markdown]
# ## Too few rows: requests wait outside
#
# Now requests arrive at random at a rate. Left: with too few rows a queue builds up, and the first
# token takes minutes. How many rows are enough depends on the rate; **more than enough does no
# harm, until the pool is full**. Right: the trade-off. Each curve is a token budget, each point a
# number of rows, and the queue is never empty. Up is more throughput, left is shorter gaps. By the
# roofline, in which reading and computing overlap perfectly, a small budget has both: its steps mix
# a few prompt tokens, which need arithmetic, with decodes, which need memory.

# %%
ttft_p99: dict[float, list[float]] = {}
figure, (left, right) = figures.new_figure(1, 2, size=(11, 4.4))
for at, (rate, color) in enumerate(REQUEST_RATES.items()):
    runs = [serve(rate, max_num_seqs=n) for n in MAX_NUM_SEQS]
    ttft_p99[rate] = [run.latency("ttft").p99 for run in runs]
    left.plot(MAX_NUM_SEQS, ttft_p99[rate], "o-", color=color)
    at = (1, 2, 4)[at]  # where there is room for the name
    figures.label(
        left,
        MAX_NUM_SEQS[at],
        ttft_p99[rate][at],
        f"{rate:g}/s",
        color,
        offset=(-7, -5),
        align="right",
    )
left.axvline(pool_holds, color=figures.GREY, linewidth=1.2, linestyle=":")
left.set_yscale("log")
left.yaxis.set_major_formatter("{x:,g}")
left.set(xlabel="max_num_seqs", ylabel="p99 of time to first token, seconds")
left.set_xlim(left=0)
left.set_title("Requests per second decide how many rows are enough")

right.set(xlabel="p99 of gaps between tokens, milliseconds", ylabel="output tokens per second")
right.set(ylim=(0, 1600), xlim=(0, 300))
right.set_title("Rows buy throughput, a large budget only longer gaps")
trade_off: dict[int, list[tuple[float, float]]] = {}
for budget, color in TRADED_BUDGETS.items():
    trade_off[budget] = []
    for n in TRADED_SEQS:
        run = serve(float("inf"), max_num_seqs=n, max_num_batched_tokens=budget)
        gap = 1000 * run.latency("itl").p99
        trade_off[budget].append((gap, run.per_second(run.totals.output_tokens)))
        name = f"{n} rows" if budget == min(TRADED_BUDGETS) else str(n)
        figures.label(right, *trade_off[budget][-1], name, color, offset=(8, -7), bold=False)
    gaps, rates = zip(*trade_off[budget], strict=True)
    right.plot(gaps, rates, "o-", color=color)
    name = f"budget {budget:,}"
    figures.label(right, gaps[-1], rates[-1], name, color, offset=(0, 14), align="center")

# %% [markdown]
# ## The token budget: as long as a step may take
#
# 2 requests per second. The grey line is no simulation: it is the time of one step full of prompt
# tokens beside 32 decodes. The slowest gaps follow it, up to the budget that prompts rarely fill.
# So the budget follows from the gap that users accept: **the largest one whose full step is short
# enough**. Far to the left the first token pays: prompts are cut into more steps than they need.

# %%
gap_p99, first_p99, full_step = [], [], []
for budget in BUDGETS:
    run = serve(2.0, max_num_batched_tokens=budget)
    gap_p99.append(1000 * run.latency("itl").p99)
    first_p99.append(1000 * run.latency("ttft").p99)
    context = NUM_DECODES * int(held_tokens)
    pairs = context + budget * (budget + 1) // 2
    load = StepLoad(NUM_DECODES + budget, NUM_DECODES + 1, pairs, context + budget)
    full_step.append(1000 * cost.step_seconds(load))
figure, axes = figures.new_figure(size=(9, 4.4))
axes.plot(BUDGETS, full_step, color=figures.GREY, linewidth=6, alpha=0.4)
axes.plot(BUDGETS, gap_p99, "o-", color=figures.BLUE)
axes.plot(BUDGETS, first_p99, "o-", color=figures.ORANGE)
figures.label(axes, BUDGETS[3], full_step[3], "one full step", figures.GREY, offset=(14, 0))
figures.label(axes, BUDGETS[-1], gap_p99[-1], "gaps, p99", figures.BLUE)
figures.label(axes, BUDGETS[1], first_p99[1], "first token, p99", figures.ORANGE, offset=(0, 12))
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks(BUDGETS, [f"{budget:,}" for budget in BUDGETS])
axes.set_yticks([20, 50, 100, 200, 500, 1000], minor=False)
axes.yaxis.set_major_formatter("{x:,g}")
axes.yaxis.set_minor_formatter("")
axes.set(xlabel="max_num_batched_tokens", ylabel="milliseconds", ylim=(18, 1200))
figures.headline(axes, "The slowest gaps are full steps, while prompts are there to fill them")

# %% [markdown]
# ## A rule of thumb
#
# 1. `max_num_seqs`: tokens of the pool / tokens that a running request holds (first cell). There
#    throughput peaks; a quarter less, and hardly anybody is ever preempted.
# 2. `max_num_batched_tokens`: the largest whose full step takes no longer than the gap that users
#    accept, but not below the few hundred tokens at which reading the weights takes as long as
#    computing with them.

# %%
ACCEPTED_GAP = 100  # milliseconds
ridge_tokens = (cost.compute_efficiency * cost.gpu.bf16_flops) / (
    cost.memory_efficiency * cost.gpu.bytes_per_second
)
fitting = [b for b, ms in zip(BUDGETS, full_step, strict=True) if ms <= ACCEPTED_GAP]
print(f"max_num_seqs: at most {pool_holds:.0f}; simulated best of {MAX_NUM_SEQS}: {best_num_seqs}")
print(
    f"max_num_batched_tokens: {max(fitting)} for gaps of {ACCEPTED_GAP} ms; "
    f"weights and arithmetic are even at {ridge_tokens:.0f}"
)
