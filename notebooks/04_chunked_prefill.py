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
# # What does a long prompt do to everybody else?
#
# Eight requests are decoding when a prompt of 16,000 tokens arrives, and two short prompts right
# behind it. A step computes at most `max_num_batched_tokens` tokens, and every request that is
# decoding waits for the step to end. So the token budget decides how long everybody waits.
#
# Scheduler and pool are the engine's own; steps take as long as the roofline of an H100 says.

# %%
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import figures
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.output import ModelRunnerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.simulator.arrivals import LengthDistribution, sharegpt
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.gpus import find_gpu
from paged.scheduler.simulator.model_presets import find_model
from paged.scheduler.simulator.roofline import Roofline
from paged.scheduler.simulator.simulate import simulate
from paged.scheduler.simulator.step_cost import StepLoad

MODEL, GPU = "llama-3.1-8b", "h100"
NUM_DECODES, DECODE_CONTEXT = 8, 1000
LONG_PROMPT, SHORT_PROMPT, NUM_SHORT = 16_000, 300, 2
LONG_ARRIVES, SHORT_ARRIVE = 0.05, 0.10  # seconds
SHOWN_SECONDS = 0.75
SETTINGS = {  # max_num_batched_tokens, long_prefill_token_threshold
    "whole prompt in one step": (32_768, 0),
    "budget 2048": (2048, 0),
    "budget 512": (512, 0),
    "budget 2048, threshold 512": (2048, 512),
}
BUDGETS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384]  # of the second figure
NUM_REQUESTS, REQUEST_RATE = 300, 14.0  # of the third figure; requests per second

DECODES = [f"decode {i + 1}" for i in range(NUM_DECODES)]
SHORTS = [f"short {i + 1}" for i in range(NUM_SHORT)]
cost = Roofline(find_gpu(GPU), find_model(MODEL))


# %%
@dataclass
class Timeline:
    """What each request computed when.

    Attributes:
      rows: by request (start second, seconds, tokens) of the steps that it took part in.
      token_times: by request when its output tokens came, seconds.
      arrivals: by request, seconds.
    """

    rows: dict[str, list[tuple[float, float, int]]] = field(default_factory=dict)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)

    def gaps(self, names: Sequence[str], since: float) -> np.ndarray:
        """Gaps between tokens of these requests that end after `since`, milliseconds."""
        times = [np.array(self.token_times[name]) for name in names]
        return 1000 * np.concatenate([np.diff(t)[t[1:] > since] for t in times])

    def ttft(self, name: str) -> float:
        """Time to first token, milliseconds."""
        return 1000 * (self.token_times[name][0] - self.arrivals[name])


def run(budget: int, threshold: int) -> Timeline:
    """Serve decodes, then the long prompt and the short ones."""
    now = 0.0
    scheduler = Scheduler(
        pool=BlockPool(cost.num_blocks(), 16, enable_caching=False),
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        max_model_len=32_768,
        long_prefill_token_threshold=threshold,
        clock=lambda: now,
    )
    timeline = Timeline()

    def submit(name: str, num_tokens: int, arrival: float) -> None:
        prompt = tuple(range(num_tokens))
        scheduler.add(Request(name, prompt, SamplingParams(), max_tokens=5000))
        timeline.rows[name], timeline.token_times[name] = [], []
        timeline.arrivals[name] = arrival

    def step() -> None:
        nonlocal now
        output = scheduler.schedule()
        loads = [
            StepLoad(n, int(samples), n * start + n * (n + 1) // 2, start + n)
            for _, start, n, samples, _ in output.scheduled
        ]
        seconds = cost.step_seconds(StepLoad(*map(sum, zip(*loads, strict=True))))
        for row in output.scheduled:
            timeline.rows[row.request.request_id].append((now, seconds, row.num_tokens))
        now += seconds
        tokens = ModelRunnerOutput(np.zeros(len(output.scheduled), np.int32))
        for update in scheduler.update(output, tokens):
            timeline.token_times[update.request.request_id].append(now)

    for name in DECODES:
        submit(name, DECODE_CONTEXT, arrival=-1.0)
    while not all(timeline.token_times.values()):
        step()
    now = 0.0  # everybody decodes: here the pictures start
    for times in (timeline.rows, timeline.token_times):
        times.update({name: [] for name in times})
    coming = [(LONG_ARRIVES, "long", LONG_PROMPT)]
    coming += [(SHORT_ARRIVE, name, SHORT_PROMPT) for name in SHORTS]
    while coming or now < SHOWN_SECONDS or not all(timeline.token_times.values()):
        while coming and coming[0][0] <= now:
            arrival, name, num_tokens = coming.pop(0)
            submit(name, num_tokens, arrival)
        step()
    return timeline


timelines = {name: run(*limits) for name, limits in SETTINGS.items()}

# %% [markdown]
# ## Who computes what, and when
#
# Each row is a request. A blue tick is a token of a request that was decoding all along: look for
# **gaps between blue ticks**. Bars are steps with a piece of a prompt, the number of its tokens
# inside; a triangle is an arrival, ticks behind a bar are output tokens. In the last picture one
# prompt may take at most 512 tokens of a step, and what is left of the budget goes to the next in
# the queue: short prompts no longer wait for the long one.

# %%
shown = [*DECODES[:3], "long", *SHORTS]
colors = dict.fromkeys(DECODES, figures.BLUE) | dict.fromkeys(SHORTS, figures.GREEN)
colors["long"] = figures.ORANGE
results = {}
figure, grid = figures.new_figure(len(SETTINGS), 1, size=(11, 8.6), sharex=True)
for axes, (setting, timeline) in zip(grid, timelines.items(), strict=True):
    for row, name in enumerate(shown):
        color = colors[name]
        for start, seconds, tokens in timeline.rows[name]:
            if tokens > 1:
                axes.barh(
                    row,
                    1000 * seconds,
                    left=1000 * start,
                    height=0.72,
                    color=color,
                    edgecolor="white",
                    linewidth=0.6,
                )
                if seconds > 0.025:
                    axes.text(
                        1000 * (start + seconds / 2),
                        row + 0.03,
                        f"{tokens:,}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color=figures.INK if name == "long" else "white",
                    )
        times = 1000 * np.array(timeline.token_times[name])
        axes.plot(times, np.full(len(times), row), "|", color=color, ms=9, mew=1)
        if timeline.arrivals[name] > 0:
            axes.plot(1000 * timeline.arrivals[name], row, ">", color=color, ms=7)
    found = results[setting] = {
        "longest_gap": float(timeline.gaps(DECODES, LONG_ARRIVES).max()),
        "ttft_long": timeline.ttft("long"),
        "ttft_short": max(timeline.ttft(name) for name in SHORTS),
    }
    axes.set(yticks=range(len(shown)), yticklabels=shown, ylim=(len(shown) - 0.4, -0.6))
    axes.set_xlim(0, 1000 * SHOWN_SECONDS)
    axes.grid(visible=False, axis="y")
    axes.set_title(
        f"{setting}: longest gap {found['longest_gap']:.0f} ms; first token of the long prompt "
        f"after {found['ttft_long']:.0f} ms, of the short ones after {found['ttft_short']:.0f} ms",
        fontsize=10,
    )
grid[-1].set_xlabel("milliseconds")
figures.headline(figure, "Chunks keep decodes running; a cap per prompt lets short prompts through")
for setting, found in results.items():
    print(f"{setting:28}", {key: round(value) for key, value in found.items()})

# %% [markdown]
# ## How small should a chunk be?
#
# The same scene for more budgets. The longest gap falls with the budget; the long prompt pays only
# where steps are so small that reading the weights takes longer than computing with them. The two
# take equally long at the dotted line, about 220 tokens on an H100: **below it a smaller budget
# buys almost no shorter gaps, and the prompt waits several times longer.**

# %%
peak = cost.compute_efficiency * cost.gpu.bf16_flops
bandwidth = cost.memory_efficiency * cost.gpu.bytes_per_second
ridge_tokens = peak / bandwidth  # one token does 2 FLOPs with every 2 bytes of bf16 weights
by_budget = {budget: run(budget, 0) for budget in BUDGETS}
longest_gaps = [float(t.gaps(DECODES, LONG_ARRIVES).max()) for t in by_budget.values()]
waits = [timeline.ttft("long") for timeline in by_budget.values()]
figure, axes = figures.new_figure(size=(9, 4.2))
axes.plot(BUDGETS, waits, "o-", color=figures.ORANGE)
axes.plot(BUDGETS, longest_gaps, "o-", color=figures.BLUE)
figures.label(
    axes, BUDGETS[1], waits[1], "first token of the long prompt", figures.ORANGE, offset=(8, 8)
)
figures.label(
    axes, BUDGETS[4], longest_gaps[4], "longest gap of the decodes", figures.BLUE, offset=(10, -6)
)
axes.axvline(ridge_tokens, color=figures.GREY, linewidth=1.2, linestyle=":")
figures.label(
    axes,
    ridge_tokens,
    1.4 * min(longest_gaps),
    "weights and arithmetic take equally long",
    figures.GREY,
    offset=(6, -14),
)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks(BUDGETS, [f"{budget:,}" for budget in BUDGETS])
axes.yaxis.set_major_formatter("{x:,g}")
axes.set(xlabel="max_num_batched_tokens", ylabel="milliseconds", ylim=(6, 4000))
figures.headline(axes, "Half the budget, half the gap: free of charge down to a few hundred tokens")

# %% [markdown]
# ## Under load
#
# 300 requests with prompts of very different lengths (lognormal, 2,000 tokens on average, at most
# 16,000) arrive at random, 14 per second. Left: gaps between tokens of all requests. Right: time to
# first token. The median gap is the same everywhere: look at p99. The cap per prompt helps the
# short prompts, which are most of them (p50), at the cost of the longest (p99).

# %%
trace = sharegpt(
    NUM_REQUESTS,
    REQUEST_RATE,
    prompt=LengthDistribution(2000, 1.5, maximum=16_000),
    output=LengthDistribution(200, 0.7),
)
percentiles = {}
for setting, (budget, threshold) in SETTINGS.items():
    config = SimulationConfig(
        cost.num_blocks(),
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=False,
    )
    result = simulate(trace, config, cost)
    percentiles[setting] = {
        name: [1000 * getattr(result.latency(name), p) for p in ("p50", "p99")]
        for name in ("itl", "ttft")
    }

figure, (left, right) = figures.new_figure(1, 2, size=(11, 3.4), sharey=True)
for axes, name, title in [
    (left, "itl", "Gap between tokens (ITL)"),
    (right, "ttft", "Time to first token (TTFT)"),
]:
    for row, found in enumerate(percentiles.values()):
        values = found[name]
        axes.plot([values[0], values[-1]], [row, row], color=figures.PALE, linewidth=3, zorder=1)
        for value, color in zip(values, (figures.BLUE, figures.RED), strict=True):
            axes.plot(value, row, "o", color=color, ms=8)
            number = f"{value:,.0f}"
            figures.label(
                axes, value, row, number, color, offset=(0, 11), align="center", bold=False
            )
    for value, text, color in zip(
        next(iter(percentiles.values()))[name],
        ("p50", "p99"),
        (figures.BLUE, figures.RED),
        strict=True,
    ):
        figures.label(axes, value, 0, text, color, offset=(0, 25), align="center")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xticks([10, 20, 50, 100, 200, 500] if name == "itl" else [50, 100, 200, 500, 1000])
    axes.set(yticks=range(len(SETTINGS)), yticklabels=SETTINGS, ylim=(3.5, -0.9))
    axes.set_xlabel("milliseconds")
    axes.grid(visible=False, axis="y")
    axes.set_title(title)
figures.headline(
    figure, "Under load the budget sets the slowest gaps; the cap per prompt helps short prompts"
)
