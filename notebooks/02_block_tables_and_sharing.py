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
# # Who holds which block?
#
# The engine's own `Scheduler` and `BlockPool` are driven by hand here, step by step, without a
# model: wherever the device would return a token, the token 7 comes back. After each step the pool
# is drawn. **Every square is a block of four slots**, filled as far as it holds tokens; on the
# right stand the block tables, that is, what a request knows about where its keys and values are.

# %%
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.output import ModelRunnerOutput, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler
from pool_pictures import Film

BLOCK_SIZE = 4  # tokens; small, so that a block fits into a picture (the engine's default is 16)
NUM_BLOCKS = 13  # block 0 is the null block, 12 can be used


# %%
def make_scheduler(
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    windows: Sequence[int | None] = (None,),
) -> Scheduler:
    """An empty pool and a scheduler that nothing but the pool limits."""
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(
        pool=pool, max_num_seqs=8, max_num_batched_tokens=256,
        max_model_len=pool.num_usable // len(windows) * block_size, windows=windows,
    )  # fmt: skip


def make_request(
    name: str, text: str, num_tokens: int, max_tokens: int = 50, **more: Any
) -> Request:
    """A request for the first `num_tokens` tokens of a text; equal texts have equal tokens."""
    first = 1000 * ord(text)
    prompt = tuple(range(first, first + num_tokens))
    return Request(name, prompt, SamplingParams(), max_tokens, **more)


def step(scheduler: Scheduler, times: int = 1) -> SchedulerOutput:
    """Run steps in which every row that samples gets the token 7."""
    for _ in range(times):
        output = scheduler.schedule()
        scheduler.update(output, ModelRunnerOutput(np.full(len(output.scheduled), 7, np.int32)))
    return output


# %% [markdown]
# ## A table grows one block at a time, and equal prefixes are stored once
#
# Look at the right edge of each request in 1 and 2: only its **last** block is partly empty. In 3
# and 4 look at the blocks of A: they outlive it and are found again by C. In 5 three samples of one
# prompt need nine blocks in their tables and only five in the pool.

# %%
scheduler = make_scheduler()
pool = scheduler.pool
film = Film(pool, ["A", "B", "C", "D1", "D2", "D3"])

a, b = make_request("A", "x", 10), make_request("B", "y", 6)
scheduler.add(a)
scheduler.add(b)
step(scheduler)
film.shoot("A (10 tokens) and B (6 tokens) are prefilled", {"A": a, "B": b})

step(scheduler, 3)
film.shoot("after 3 more tokens each has taken one more block", {"A": a, "B": b})

scheduler.abort(["A"])
film.shoot("A ends: its full blocks stay findable", {"B": b})

c = make_request("C", "x", 10)
scheduler.add(c)
step(scheduler)
prefix_hit_tokens = c.num_cached_tokens
film.shoot("C asks what A asked: 8 of 10 tokens are hits", {"B": b, "C": c})

scheduler.abort(["B", "C"])
samples = {
    f"D{i + 1}": make_request(f"D{i + 1}", "z", 10, parent_id="D", index=i, num_samples=3)
    for i in range(3)
}
for sample in samples.values():
    scheduler.add(sample)
step(scheduler, 2)
num_sample_blocks = pool.num_usable - pool.num_free
film.shoot("D wants n = 3 samples: full blocks of its prompt are held once", samples)
figure = film.draw("A request wastes less than one block, and equal prefixes are stored once")

# %% [markdown]
# ## Writing into a shared block costs a copy; a full pool costs the newest request its blocks
#
# In 1 the fork points to the parent's blocks, the half-full one included. In 2 the parent writes
# first: it gets a copy and the fork keeps the original. In 3 six blocks are all there is. In 4 the
# older request needs one more, so the newer one gives **all** of its blocks back and waits. In 5 it
# has returned: what was not overwritten meanwhile is a prefix hit.

# %%
scheduler = make_scheduler(num_blocks=7)
pool = scheduler.pool
film = Film(pool, ["P", "F", "Q"])

p = make_request("P", "x", 6)
scheduler.add(p)
step(scheduler)
f = Request("F", tuple(p.tokens(0, p.num_tokens)), SamplingParams(), 50)
scheduler.fork(p, f)
film.shoot("F is forked from P: no block is copied", {"P": p, "F": f})

copies = step(scheduler).block_copies
film.shoot("P writes its next token: copy on write", {"P": p, "F": f}, copies=copies)

scheduler.abort(["F"])
q = make_request("Q", "y", 11)
scheduler.add(q)
while pool.num_free:
    step(scheduler)
film.shoot("F has ended, Q has come, both have grown: nothing is free", {"P": p, "Q": q})

while not q.num_preemptions:
    step(scheduler)
film.shoot("P needs a block: Q is preempted", {"P": p, "Q": q}, remarks={"Q": "waits, tokens kept"})

scheduler.abort(["P"])
(row,) = step(scheduler).scheduled
film.shoot(
    f"P has ended, Q is back: {row.start} of its {row.start + row.num_tokens} tokens are hits",
    {"Q": q},
)
figure = film.draw("Who writes into a shared block pays a copy; the newest pays for a full pool")

# %% [markdown]
# ## Eviction: tails first
#
# Ten usable blocks of 16 tokens; three texts are asked for, one request at a time, one output token
# each. Read the lower row of each picture: free blocks in the order in which they will be taken. A
# request gives its blocks back **tail first**, and its half-full block, which nobody can find, goes
# to the very front. In 5 there are four empty blocks for a text of five: the tail of y is lost, and
# the next request for y still finds its head. (In 4 only 16 of 32 tokens are hits: at least the
# last token has to be computed, and hits are whole blocks.)

# %%
scheduler = make_scheduler(num_blocks=11, block_size=16)
pool = scheduler.pool
film = Film(pool, ["x", "y", "z"])
free_orders, eviction_hits = [], []
for text, num_tokens in [("x", 40), ("y", 50), ("x", 40), ("x", 32), ("z", 80), ("y", 50)]:
    request = make_request(text, text, num_tokens, max_tokens=1)
    scheduler.add(request)
    output = scheduler.schedule()
    film.note_owners({text: request})
    held = request.block_ids
    scheduler.update(output, ModelRunnerOutput(np.array([7], np.int32)))
    free_orders.append(pool.free_order())
    eviction_hits.append(request.num_cached_tokens)
    caption = f"{text}, {num_tokens} tokens, {request.num_cached_tokens} hits, "
    caption += f"was computed in blocks {', '.join(map(str, held))}"
    film.shoot(caption, {}, with_free_order=True)
figure = film.draw("The tail of a prefix is evicted before its head")

# %% [markdown]
# ## Layers with a sliding window give blocks back
#
# One request of a model in which half of the layers see only the last 8 tokens. It has **two block
# tables**: that of the full-attention layers keeps growing, that of the sliding layers never holds
# more than three blocks; the null block stands where the window has passed.

# %%
scheduler = make_scheduler(windows=(None, 8))
film = Film(scheduler.pool, ["full", "window"])
request = make_request("W", "x", 7)
scheduler.add(request)
window_blocks = []
for num_computed in (7, 13, 22):
    while request.num_computed_tokens < num_computed:
        step(scheduler)
    window_blocks.append([block_id for block_id in request.block_tables[1] if block_id])
    film.shoot(f"{num_computed} tokens computed", {"W": request}, groups=["full", "window"])
figure = film.draw("Behind a sliding window blocks become free again")
