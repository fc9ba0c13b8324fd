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
# # How large is a KV cache, and what does it cost to read?
#
# Sizes come from `KVCacheSpec`, the engine's only place for byte arithmetic; times from the
# simulator's `Roofline`, which knows data sheets and no measurement (`docs/simulator.md`).

# %%
import dataclasses

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm

import figures
from paged.kv_cache import KVCacheSpec
from paged.models.config import ModelConfig
from paged.scheduler.errors import CapacityError
from paged.scheduler.simulator.gpus import GPU, GPUS, find_gpu
from paged.scheduler.simulator.model_presets import find_model
from paged.scheduler.simulator.roofline import Roofline
from paged.scheduler.simulator.step_cost import StepLoad

KIB, MIB, GIB = 2**10, 2**20, 2**30
BLOCK_SIZE = 16
MODELS = {
    "smollm2-135m": "SmolLM2 135M",
    "qwen2.5-1.5b": "Qwen2.5 1.5B",
    "qwen2.5-7b": "Qwen2.5 7B",
    "llama-3.1-8b": "Llama 3.1 8B",
    "llama-3.1-70b": "Llama 3.1 70B",
    "qwen2.5-72b": "Qwen2.5 72B",
}
MEMORY_GPUS = ["rtx-4090", "l40s", "a100", "h100", "h200", "b200"]
ROOFLINE_MODEL, ROOFLINE_GPU = "llama-3.1-8b", "h100"


def kv_spec(model: ModelConfig, dtype: str = "bfloat16") -> KVCacheSpec:
    """What a block of this model holds."""
    return KVCacheSpec(model.num_layers, model.num_kv_heads, model.head_dim, BLOCK_SIZE, dtype)


# %% [markdown]
# ## Bytes per token
#
# Two vectors (key and value) per layer and kv head: `2 * layers * kv_heads * head_dim * bytes`.
# Left picture: the full dot is the model as it is; the ring to the right is what it would be if
# every query head had keys and values of its own (MHA); the small dot to the left is the cache in
# fp8, half of it. Right picture: what the last, partly empty block of a request wastes; it depends
# on nothing but length and block size.

# %%
sizes: dict[str, dict[str, int]] = {}
for name in MODELS:
    model = find_model(name)
    as_mha = dataclasses.replace(model, num_kv_heads=model.num_q_heads)
    sizes[name] = {
        "bfloat16": kv_spec(model).bytes_per_token,
        "fp8": kv_spec(model, "float8_e4m3fn").bytes_per_token,
        "mha": kv_spec(as_mha).bytes_per_token,
    }

figure, (left, right) = figures.new_figure(1, 2, size=(11, 4.2), width_ratios=(3, 2))
for row, name in enumerate(MODELS):
    full, half, mha = (sizes[name][key] / KIB for key in ("bfloat16", "fp8", "mha"))
    left.plot([half, mha], [row, row], color=figures.PALE, linewidth=3, zorder=1)
    left.plot(half, row, "o", color=figures.GREEN, markersize=6)
    left.plot(full, row, "o", color=figures.BLUE, markersize=10)
    left.plot(mha, row, "o", color=figures.RED, markersize=9, fillstyle="none", markeredgewidth=2)
    figures.label(left, full, row, f"{full:.4g}", figures.BLUE, offset=(0, 13), align="center")
    figures.label(left, mha, row, f"{mha / full:.0f}x", figures.RED, offset=(10, 0), bold=False)
left.set_xscale("log", base=2)
left.set_xticks([8, 16, 32, 64, 128, 256, 512, 1024, 2048])
left.xaxis.set_major_formatter("{x:.0f}")
left.minorticks_off()
left.set(yticks=range(len(MODELS)), yticklabels=MODELS.values(), xlim=(8, 5000), ylim=(-0.6, 5.9))
left.grid(axis="y", visible=False)
left.set_xlabel("KiB per token")
last = sizes["qwen2.5-72b"]
for key, text, color in [
    ("fp8", "fp8", figures.GREEN),
    ("bfloat16", "bf16", figures.BLUE),
    ("mha", "if it were MHA", figures.RED),
]:
    top = len(MODELS) - 0.2
    figures.label(left, last[key] / KIB, top, text, color, offset=(0, 0), align="center")
left.set_title("Shared kv heads: a cache 3 to 8 times smaller; fp8 halves it")

lengths = np.arange(1, 1025)
for block_size, color, label_at in [(256, figures.ORANGE, (305, 45)), (16, figures.BLUE, (300, 9))]:
    spec = dataclasses.replace(kv_spec(find_model("llama-3.1-8b")), block_size=block_size)
    allocated = np.array([spec.blocks_for(n) * spec.bytes_per_block for n in lengths.tolist()])
    wasted = np.array([spec.waste_bytes(n) for n in lengths.tolist()])
    right.plot(lengths, 100 * wasted / allocated, color=color, linewidth=1.2)
    figures.label(right, *label_at, f"blocks of {block_size}", color, offset=(0, 0))
right.set(
    xlabel="tokens of the request",
    ylabel="empty slots, % of its blocks",
    ylim=(0, 60),
    xlim=(0, 1024),
)
right.set_title("Small blocks waste next to nothing")
print(f"{'KV per token':16}{'bf16':>10}{'fp8':>10}{'as MHA':>10}   32,768 tokens in bf16")
for name, size in sizes.items():
    print(
        f"{name:16}{size['bfloat16']:10,}{size['fp8']:10,}{size['mha']:10,}"
        f"   {32768 * size['bfloat16'] / GIB:.3f} GiB"
    )

# %% [markdown]
# By hand, for a model of 32 layers with 8 kv heads of 128 features in bf16 (Llama 3.1 8B): 128 KiB
# per token, 2 MiB per block. A request of 100 tokens takes 7 blocks: 14 MiB for 12.5 MiB of
# content, and 12 empty slots are 1.5 MiB.

# %%
llama = kv_spec(find_model("llama-3.1-8b"))
hundred_tokens = {
    "blocks": llama.blocks_for(100),
    "content_mib": 100 * llama.bytes_per_token / MIB,
    "allocated_mib": llama.blocks_for(100) * llama.bytes_per_block / MIB,
    "waste_mib": llama.waste_bytes(100) / MIB,
}
print(hundred_tokens)

# %% [markdown]
# ## How many tokens fit beside the weights?
#
# All requests together, on one GPU: 92 % of its memory, less the weights in bf16, less the
# activations of a step. Read a row to the right: what the weights leave over is all cache, so
# beside Llama 8B twice the memory of an RTX 4090 holds four times its tokens. Models of 70B leave
# most GPUs no room; four GPUs share the weights *and* the cache (last two columns). SmolLM2 has 9
# query heads, which four GPUs cannot share.


# %%
def tokens_that_fit(model_name: str, gpu_name: str, parallel: int = 1) -> int:
    """Tokens of KV cache beside the weights on `parallel` GPUs; 0 if not even the weights fit."""
    roofline = Roofline(find_gpu(gpu_name), find_model(model_name), tensor_parallel_size=parallel)
    try:
        return (roofline.num_blocks(BLOCK_SIZE) - 1) * BLOCK_SIZE
    except CapacityError:
        return 0


places = [(name, 1) for name in MEMORY_GPUS] + [("h100", 4), ("h200", 4)]
capacity = np.zeros((len(MODELS), len(places)))
for row, name in enumerate(MODELS):
    for column, (gpu, parallel) in enumerate(places):
        if find_model(name).num_q_heads % parallel == 0:
            capacity[row, column] = tokens_that_fit(name, gpu, parallel)

shades = LinearSegmentedColormap.from_list("blue", ["white", figures.BLUE])
shades.set_bad("white")
figure, axes = figures.new_figure(size=(11, 3.6))
axes.imshow(np.ma.masked_less(capacity, 1), aspect="auto", cmap=shades, norm=LogNorm(5e3, 2e7))
for (row, column), tokens in np.ndenumerate(capacity):
    text = f"{tokens / 1e3:.0f} k" if tokens < 999_500 else f"{tokens / 1e6:.1f} M"
    axes.text(
        column,
        row,
        text if tokens else "-",
        ha="center",
        va="center",
        color="white" if tokens > 5e5 else figures.INK,
    )
labels = [
    f"{parallel} x {name}\n{parallel * GPUS[name].memory_bytes / GIB:.0f} GiB"
    if parallel > 1
    else f"{name}\n{GPUS[name].memory_bytes / GIB:.0f} GiB"
    for name, parallel in places
]
axes.set_xticks(range(len(places)), labels)
axes.set_yticks(range(len(MODELS)), MODELS.values())
axes.tick_params(length=0)
axes.grid(visible=False)
axes.spines[:].set_visible(False)
figures.headline(
    axes, "Tokens of context beside bf16 weights: what the weights leave over is all cache"
)

# %% [markdown]
# ## What a step costs
#
# A GPU of one FLOP per second and endless bandwidth takes as many seconds for a step as the step
# has FLOPs; one with endless arithmetic tells the bytes. Their ratio is the step's *arithmetic
# intensity*. A GPU needs a certain intensity, its *ridge*, before its arithmetic is the limit.
#
# Left: decodes of 1, 8, 64 and 256 requests with 2,048 tokens of context, and prefills of 128, 512
# and 2,048 tokens, against the limits of the GPU. Right: weights are read once for the whole batch,
# but each request reads its own cache. With long contexts the cache is nearly all that is read, and
# no batch size lifts the intensity to the ridge.


# %%
def flops_and_bytes(model: ModelConfig, load: StepLoad) -> tuple[float, float]:
    """FLOPs of a step, and bytes that it reads and writes."""
    counter = GPU("counter", 1.0, 1.0, 1.0, 1, 1.0)
    ideal = {"compute_efficiency": 1.0, "memory_efficiency": 1.0, "step_overhead_seconds": 0.0}
    flops = Roofline(dataclasses.replace(counter, bytes_per_second=1e30), model, **ideal)
    bytes_ = Roofline(dataclasses.replace(counter, bf16_flops=1e30), model, **ideal)
    return flops.step_seconds(load), bytes_.step_seconds(load)


def decode(batch: int, context: int) -> StepLoad:
    """One token for each of `batch` requests whose context is then `context` tokens long."""
    return StepLoad(batch, batch, batch * context, batch * context)


def prefill(num_tokens: int, start: int = 0) -> StepLoad:
    """A chunk of one prompt, `start` tokens of which are computed already."""
    pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return StepLoad(num_tokens, 1, pairs, start + num_tokens)


model, gpu = find_model(ROOFLINE_MODEL), find_gpu(ROOFLINE_GPU)
roofline = Roofline(gpu, model)
peak = roofline.compute_efficiency * gpu.bf16_flops
bandwidth = roofline.memory_efficiency * gpu.bytes_per_second
ridge = peak / bandwidth

figure, (left, right) = figures.new_figure(1, 2, size=(11, 4.6))
span = np.geomspace(0.5, 1e4, 200)
left.loglog(span, np.minimum(peak, span * bandwidth) / 1e12, color=figures.GREY, linewidth=2)
left.annotate(
    "limit: memory",
    (4, 4 * bandwidth / 1e12),
    xytext=(-6, 8),
    rotation=38,
    textcoords="offset points",
    ha="center",
    va="bottom",
    color=figures.GREY,
)
figures.label(
    left,
    1500,
    peak / 1e12,
    "limit: arithmetic",
    figures.GREY,
    offset=(0, 10),
    align="center",
    bold=False,
)
batches, chunks, context = [1, 8, 64, 256], [128, 512, 2048], 2048
names = {1: "decode of 1 request", 128: "prefill of 128 tokens"}
for loads, numbers, color in [
    ([decode(b, context) for b in batches], batches, figures.BLUE),
    ([prefill(n) for n in chunks], chunks, figures.RED),
]:
    for load, number in zip(loads, numbers, strict=True):
        flops, bytes_ = flops_and_bytes(model, load)
        x, y = flops / bytes_, flops / roofline.step_seconds(load) / 1e12
        left.plot(x, y, "o", color=color, markersize=8)
        name = names.get(number, str(number))
        figures.label(left, x, y, name, color, offset=(9, -5), bold=False)
left.set(
    xlabel="arithmetic intensity, FLOP per byte",
    ylabel="TFLOP/s",
    xlim=(0.5, 1e4),
    ylim=(0.8, 1500),
)
left.set_title("Decode is bound by memory, prefill by arithmetic")

batch = np.unique(np.geomspace(1, 1024, 40).astype(int))
intensity: dict[int, list[float]] = {}
for context, color in [(128, figures.GREEN), (2048, figures.BLUE), (32768, figures.PURPLE)]:
    pairs = [flops_and_bytes(model, decode(int(b), context)) for b in batch]
    intensity[context] = [flops / bytes_ for flops, bytes_ in pairs]
    right.loglog(batch, intensity[context], color=color)
    name = f"context {context:,}"
    figures.label(right, batch[-1], intensity[context][-1], name, color)
right.axhline(ridge, color=figures.GREY, linewidth=1.5, linestyle=":")
figures.label(right, 1, ridge, f"ridge of the {ROOFLINE_GPU.upper()}", figures.GREY, offset=(0, 9))
right.set(xlabel="requests decoding in a step", ylabel="arithmetic intensity, FLOP per byte")
right.set_title("Long contexts: a larger batch stops helping")
for axis in (left.xaxis, left.yaxis, right.xaxis, right.yaxis):
    axis.set_major_formatter("{x:,g}")
figures.headline(figure, f"{MODELS[ROOFLINE_MODEL]} on one {ROOFLINE_GPU.upper()}, by the roofline")

# %% [markdown]
# Attention alone does `num_q_heads / num_kv_heads` FLOPs per byte of a bf16 cache, 4 here, at any
# batch size: that is what shared kv heads buy in time. The rest of the purple line's 7.5 are the
# products with the weights.

# %%
kv_bytes_per_token = {name: size["bfloat16"] for name, size in sizes.items()}
gib_of_32768_tokens = {name: 32768 * size["bfloat16"] / GIB for name, size in sizes.items()}
kv_bytes_of_4864_tokens = 4864 * kv_bytes_per_token["qwen2.5-1.5b"]
kv_bytes_of_21520_tokens = 21520 * kv_bytes_per_token["qwen2.5-1.5b"]
