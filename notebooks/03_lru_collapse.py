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
# # Why does a cache that holds four of ten documents hit nothing?
#
# Ten documents of 5,033 tokens are asked for in turn, then in turn again, then backwards. The pool
# has 1,344 usable blocks of 16 tokens: four documents and a bit. The least recently used block is
# evicted first, as everywhere. The second pass hits **nothing at all**. Other orders of eviction
# save up to 43 % of it, with the same memory.
#
# Scheduler, pool and policies are the engine's own; see `docs/simulator.md` for what is simulated.

# %%
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

import figures
from paged.scheduler.output import ModelRunnerOutput
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.pools import make_pool
from paged.scheduler.simulator.simulate import simulate
from paged.scheduler.simulator.simulated_request import make_request
from paged.scheduler.simulator.traces import make_trace

NUM_DOCUMENTS = 10
DOCUMENT_TOKENS = 5033
PASSES = ("forward", "forward", "reverse")
NUM_BLOCKS = 1345  # the null block included
BLOCK_SIZE = 16
NUM_REQUESTS = 200  # of each trace in the last figure
NUM_CHATS = 30  # of five turns each, there

# %% [markdown]
# ## What is in the cache when a document is asked for
#
# Each column is a request, each row a document; the darker a cell, the more of that document's
# blocks are cached **just before** the request. The framed cell is the document that is asked for:
# a dark frame is a hit, a white one a miss.


# %%
def watch(policy: str) -> tuple[np.ndarray, list[int], list[int]]:
    """Serve the trace one request at a time.

    Returns: share of each document's blocks that are cached before each request
    `[num_documents, num_requests]`; the document of each request; its hits, tokens.
    """
    trace = make_trace(
        "cyclic", documents=NUM_DOCUMENTS, document_tokens=DOCUMENT_TOKENS, passes=PASSES
    )
    config = SimulationConfig(NUM_BLOCKS, BLOCK_SIZE, policy=policy)
    pool = make_pool(config, trace)
    scheduler = Scheduler(
        pool=pool, max_num_seqs=1, max_num_batched_tokens=2048,
        max_model_len=pool.num_usable * BLOCK_SIZE,
    )  # fmt: skip
    # All requests wait from the start, as in an offline batch: a policy may look at the queue.
    requests = [make_request(i, traced, 0.0, BLOCK_SIZE, True) for i, traced in enumerate(trace)]
    for request in requests:
        scheduler.add(request)
    contents = {tuple(request.block_hashes): None for request in requests}
    documents = list(contents)  # in the order of their first request
    resident = []
    while scheduler.num_unfinished:
        if not scheduler.num_running:
            resident.append([np.mean([pool.lookup(h) is not None for h in d]) for d in documents])
        output = scheduler.schedule()
        scheduler.update(output, ModelRunnerOutput(np.zeros(len(output.scheduled), np.int32)))
    asked = [documents.index(tuple(request.block_hashes)) for request in requests]
    return np.array(resident).T, asked, [request.num_cached_tokens for request in requests]


SHADES = LinearSegmentedColormap.from_list("blue", ["white", figures.BLUE])
POLICIES = {
    "lru": "Least recently used: keeps exactly what is asked for last",
    "mru": "Most recently used: what came first stays",
    "lookahead:8": "Look-ahead: knows the next 8 requests",
    "optimal": "Optimum: the whole future is known",
}
pass_hits = {}
figure, grid = figures.new_figure(2, 2, size=(11, 6.2), sharex=True, sharey=True)
for axes, (policy, title) in zip(grid.flat, POLICIES.items(), strict=True):
    resident, asked, hits = watch(policy)
    pass_hits[policy] = np.reshape(hits, (len(PASSES), NUM_DOCUMENTS)).sum(axis=1).tolist()
    image = axes.imshow(resident, aspect="auto", cmap=SHADES, vmin=0, vmax=1)
    for request, document in enumerate(asked):
        axes.add_patch(
            Rectangle((request - 0.5, document - 0.5), 1, 1, fill=False, ec=figures.RED, lw=1.5)
        )
    edges = np.arange(0, len(asked) + 1, NUM_DOCUMENTS) - 0.5
    figures.shade_columns(axes, edges, [f"{count:,} hit tokens" for count in pass_hits[policy]])
    axes.set_title(title, pad=18)
    axes.grid(visible=False)
    axes.set_yticks(range(NUM_DOCUMENTS))
for axes in grid[:, 0]:
    axes.set_ylabel("document")
for axes in grid[1]:
    axes.set_xticks(
        np.arange(len(PASSES)) * NUM_DOCUMENTS + (NUM_DOCUMENTS - 1) / 2,
        [f"pass {i}, {name}" for i, name in enumerate(PASSES, 1)],
    )
    axes.tick_params(axis="x", length=0)
bar = figure.colorbar(image, ax=grid, shrink=0.5, aspect=25, pad=0.01)
bar.set_label("share of the document's blocks that are cached")
figures.headline(figure, "LRU has four documents in memory, and never the one that is asked for")
for policy, counts in pass_hits.items():
    print(f"{policy:12}", *(f"{count:8,}" for count in counts))

# %% [markdown]
# Under LRU the blue band runs just behind the red frames: in pass 2 the next document has always
# been evicted a moment ago. Only the reversed pass 3 meets it. 21,488 tokens are 1,343 blocks, one
# less than there are, and nothing finds more in one pass: the optimum finds as much in pass 2, too.
# MRU gives up what it has just read, so what came first stays. The look-ahead needs no luck: it
# reads the queue.

# %% [markdown]
# ## How much memory does LRU need?
#
# Hits of pass 2, by capacity. LRU has a cliff where everything fits and is worth nothing below it;
# the others give hits in proportion to memory.

# %%
CAPACITIES = [350, 630, 1000, 1345, 1700, 2000, 2350, 2701, 2850, 3001, 3142, 3300]
CLIFF_POLICIES = {
    "optimal": (figures.INK, "optimum and MRU"),
    "lip": (figures.GREEN, "LIP"),
    "lru": (figures.RED, "LRU"),
}
two_passes = make_trace(
    "cyclic", documents=NUM_DOCUMENTS, document_tokens=DOCUMENT_TOKENS, passes=2
)
second_pass: dict[str, dict[int, int]] = {}
for policy in (*CLIFF_POLICIES, "mru"):
    second_pass[policy] = {}
    for num_blocks in CAPACITIES:
        config = SimulationConfig(num_blocks, BLOCK_SIZE, policy=policy, concurrency=1)
        second_pass[policy][num_blocks] = simulate(two_passes, config).passes[1].hit_tokens

document_blocks = DOCUMENT_TOKENS // BLOCK_SIZE
everything = NUM_DOCUMENTS * document_blocks
figure, axes = figures.new_figure(size=(9, 4.2))
for policy, (color, name) in CLIFF_POLICIES.items():
    share = [100 * hits / (everything * BLOCK_SIZE) for hits in second_pass[policy].values()]
    axes.plot([blocks - 1 for blocks in CAPACITIES], share, "o-", color=color)
    below = policy == "lip"
    figures.label(
        axes,
        CAPACITIES[5],
        share[5],
        name,
        color,
        offset=(10, -9) if below else (-8, 9),
        align="left" if below else "right",
    )
axes.axvline(everything, color=figures.GREY, linewidth=1, linestyle=":")
figures.label(
    axes, everything, 20, "all ten documents fit", figures.GREY, offset=(8, 0), align="left"
)
axes.set(
    xlabel="usable blocks of 16 tokens", ylabel="hits in pass 2, % of all full blocks",
    xlim=(0, 3900), ylim=(-3, 104),
)  # fmt: skip
figures.headline(axes, "Below its cliff memory is worth nothing to LRU")

# %% [markdown]
# ## Is another policy better, then?
#
# In loops, yes. Other traces decide otherwise: read the columns. Each cell is the hit rate in
# percent of prompt tokens; the colour compares it with the optimum of that trace, which knows the
# future. MRU wins loops and is the worst where some documents are hot; LRU is hard to beat where
# recency means something; the look-ahead has about nine tenths of the optimum's hits or more
# everywhere, as long as there is a queue to look at.

# %%
TRACES = {
    "cyclic": {"passes": NUM_REQUESTS // NUM_DOCUMENTS},
    "sawtooth": {"passes": NUM_REQUESTS // NUM_DOCUMENTS},
    "zipf": {"num_requests": NUM_REQUESTS},
    "scan": {"num_requests": NUM_REQUESTS},
    "working-set": {"num_requests": NUM_REQUESTS},
    "chat": {"sessions": NUM_CHATS},
}
COMPARED = ("lru", "mru", "lip", "arc", "auto", "lookahead:8", "optimal")
hit_percent = np.zeros((len(COMPARED), len(TRACES)))
for column, (name, options) in enumerate(TRACES.items()):
    trace = make_trace(name, **options)
    for row, policy in enumerate(COMPARED):
        config = SimulationConfig(NUM_BLOCKS, BLOCK_SIZE, policy=policy, concurrency=1)
        hit_percent[row, column] = 100 * simulate(trace, config).hit_rate

share_of_optimum = hit_percent / hit_percent[-1]
figure, axes = figures.new_figure(size=(9, 4.2))
image = axes.imshow(share_of_optimum, aspect="auto", cmap=SHADES, vmin=0, vmax=1)
for (row, column), value in np.ndenumerate(hit_percent):
    is_dark = share_of_optimum[row, column] > 0.6
    axes.text(
        column, row, f"{value:.0f}", ha="center", va="center",
        color="white" if is_dark else figures.INK,
    )  # fmt: skip
axes.set_xticks(range(len(TRACES)), TRACES)
axes.set_yticks(range(len(COMPARED)), COMPARED)
axes.tick_params(length=0)
axes.grid(visible=False)
axes.spines[:].set_visible(False)
bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=25, pad=0.01)
bar.set_label("share of the optimum's hits")
figures.headline(axes, "No policy wins everywhere; the queue knows more than the past")
