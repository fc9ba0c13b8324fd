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
# # How does a training loop share a model with the engine?
#
# One process, one set of weights, three steps that repeat: `LLM.generate` samples, a gradient is
# taken through `paged.models.token_logprobs`, `LLM.update_params` pushes the new weights into the
# running engine. Nothing is compiled after the first round, and the log probabilities that the
# engine reports for what it sampled are those that the training step computes.
#
# The model is a tiny random llama whose tokens are bytes; the reward is the share of sampled tokens
# that lie in the lower half of the vocabulary, which is a coin toss before training.

# %%
import dataclasses
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import figures
import paged.models
from paged import LLM, SamplingParams
from paged.models.compilation import CompilationCounter

ROUNDS = 24
NUM_SAMPLES, NUM_TOKENS = 64, 12
LEARNING_RATE = 0.01
PROMPT = [ord(character) for character in "the sky is"]

tiny = pathlib.Path(paged.__file__).parents[1] / "tests" / "data" / "golden" / "tiny"
folder = pathlib.Path(tempfile.mkdtemp())
for source in (tiny / "llama", tiny / "tokenizer"):
    for file in source.iterdir():
        shutil.copy(file, folder / file.name)

# %% [markdown]
# ## Structure and parameters
#
# `graphdef` is static: functions that are jitted close over it. `params` is a pytree: `jax.grad`
# differentiates by it, optimisers update it. The engine gets float32, as the training step has it;
# a loop that trains in float32 and samples in bfloat16 casts before it pushes.

# %%
graphdef, params, config = paged.models.load(folder, dtype="float32", progress=False)
optimizer = optax.adam(LEARNING_RATE)
optimizer_state = optimizer.init(params)
good_tokens = config.vocab_size // 2


@jax.jit
def completion_logprobs(params, token_ids):
    """Log probabilities `[num_samples, num_tokens]` of what was sampled after the prompt."""
    return paged.models.token_logprobs(graphdef, params, token_ids)[:, len(PROMPT) - 1 :]


@jax.jit
def train_step(params, optimizer_state, token_ids, advantages):
    """One step of REINFORCE: samples that were better than the average become likelier."""

    def loss(params):
        return -(completion_logprobs(params, token_ids) * advantages[:, None]).mean()

    gradient = jax.grad(loss)(params)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state


# %% [markdown]
# ## The loop
#
# All samples of a round share the prompt's blocks: it is computed once per round, since an update
# makes what was computed with the old weights unreachable.

# %%
llm = LLM(
    str(folder), dtype="float32", max_model_len=64, max_num_seqs=NUM_SAMPLES,
    max_num_batched_tokens=NUM_SAMPLES, num_gpu_blocks_override=512, linear_backend="xla",
    attention_backend="xla", compilation_cache_dir=None, seed=0, progress=False,
)  # fmt: skip
sampling = SamplingParams(
    n=NUM_SAMPLES, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0
)


def sample(seed):
    """Token ids and the engine's own log probabilities, `[num_samples, num_tokens]` each."""
    params = dataclasses.replace(sampling, seed=seed)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    ids = np.array([sample.token_ids for sample in output.outputs])
    logprobs = [
        [next(iter(position.values())).logprob for position in sample.logprobs]
        for sample in output.outputs
    ]
    return ids, np.array(logprobs)


rewards, differences, stale_differences, rounds = [], [], [], []
old_params, compiled = params, []
for number in range(ROUNDS):
    with CompilationCounter() as compilations:
        ids, engine_logprobs = sample(seed=number)
        reward = (ids < good_tokens).mean(axis=1)
        token_ids = jnp.asarray(np.hstack([np.tile(PROMPT, (NUM_SAMPLES, 1)), ids]), jnp.int32)
        logprobs = np.asarray(completion_logprobs(params, token_ids))
        stale = np.asarray(completion_logprobs(old_params, token_ids))
        advantages = jnp.asarray((reward - reward.mean()) / (reward.std() + 1e-6), jnp.float32)
        old_params = params
        params, optimizer_state = train_step(params, optimizer_state, token_ids, advantages)
        llm.update_params(params)
    compiled.append(compilations.count)
    rewards.append(reward.mean())
    differences.append(np.abs(engine_logprobs - logprobs).max())
    stale_differences.append(np.abs(engine_logprobs - stale).max())
    rounds.append((ids, engine_logprobs, logprobs))
llm.close()

first_reward, last_reward = np.mean(rewards[:3]), np.mean(rewards[-3:])
compiled_later = sum(compiled[2:])
print(f"programs compiled after the second round: {compiled_later}")

# %% [markdown]
# ## The reward rises

# %%
figure, axes = figures.new_figure(size=(7, 3))
axes.plot(rewards, color=figures.BLUE, marker="o")
axes.axhline(0.5, color=figures.GREY, linestyle="--")
axes.text(ROUNDS - 1, 0.51, "a coin toss", color=figures.GREY, ha="right", va="bottom")
axes.set(ylim=(0.4, 1.02), xlabel="round", ylabel="mean reward of 64 samples")
axes.set_title("A policy gradient through the engine's own model finds the reward")
figures.plt.show()

# %% [markdown]
# ## On policy, to the last digits
#
# Each dot is a sampled token. If engine and training step disagreed, the gradient would be of
# another policy than the one that sampled. In bfloat16 the two round differently, and loops correct
# for it by importance weights; here both are float32.

# %%
figure, (left, right) = figures.new_figure(1, 2, size=(9, 3.4))
for axes, number, color in ((left, 0, figures.ORANGE), (right, ROUNDS - 1, figures.GREEN)):
    _, from_engine, from_training = rounds[number]
    axes.plot([-12, 0], [-12, 0], color=figures.PALE, zorder=0)
    axes.plot(from_training.ravel(), from_engine.ravel(), ".", color=color, markersize=3)
    axes.set(xlabel="log probability, training step", ylabel="log probability, engine")
    axes.set_title(f"Round {number + 1}: equal")
figures.plt.show()

# %% [markdown]
# ## What forgetting an update would cost
#
# The same comparison with the weights of the round before: what an engine that was not updated
# would have sampled from.

# %%
figure, axes = figures.new_figure(size=(7, 3))
steps = np.arange(1, ROUNDS)
axes.semilogy(steps, stale_differences[1:], color=figures.RED, marker="o")
axes.semilogy(steps, differences[1:], color=figures.GREEN, marker="o")
axes.text(ROUNDS - 1, stale_differences[-1] * 1.6, "weights of the round before",
          color=figures.RED, ha="right")  # fmt: skip
axes.text(ROUNDS - 1, differences[-1] * 1.6, "pushed weights", color=figures.GREEN, ha="right")
axes.set(xlabel="round", ylabel="largest difference", ylim=(1e-7, 10))
axes.set_title("Pushed weights agree to rounding; stale ones do not")
figures.plt.show()
