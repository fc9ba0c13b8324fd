"""`ForwardBatch` and `SamplingBatch`: the arrays of one step, as the model sees them."""

from dataclasses import dataclass

import jax
from jax import Array

from paged.metadata import AttentionMetadata


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A flat batch of mixed prefill and decode tokens; integers are int32.

    Attributes:
      token_ids: `[num_tokens]`.
      positions: position of each token in its sequence, `[num_tokens]`.
      attention: block tables, lengths and slots, by cache group; the lengths are the same in all.
      logits_indices: token row whose logits sequence i needs (its last), `[num_seqs]`.
      lora_ids: slot of each token's LoRA adapter, 0 for none, `[num_tokens]`; None where there are
        no adapters.
    """

    token_ids: Array  # [num_tokens]
    positions: Array  # [num_tokens]
    attention: tuple[AttentionMetadata, ...]
    logits_indices: Array  # [num_seqs]
    lora_ids: Array | None = None  # [num_tokens]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters by row; a neutral row (temperature 0, the rest off) is greedy.

    Attributes:
      temperature: float32 `[num_seqs]`; 0 takes the argmax.
      top_k: int32 `[num_seqs]`; 0 keeps all.
      top_p: float32 `[num_seqs]`, in (0, 1]; 1 keeps all.
      min_p: float32 `[num_seqs]`, in [0, 1]; 0 keeps all.
      presence_penalty, frequency_penalty: float32 `[num_seqs]`; 0 is neutral.
      repetition_penalty: float32 `[num_seqs]`; 1 is neutral.
      seeds: uint32 `[num_seqs, 2]`, high and low word of a 64-bit seed. With the position of the
        sampled token it is the whole state of the draw: neither batch mates nor preemption
        nor chunking change the result.
      num_prompt_tokens: int32 `[num_seqs]`; tokens before this index are the prompt for penalties.
      edit_ids: int32 `[num_seqs, max_logit_edits]`, token ids whose logits get `edit_values`
        added; entries of `vocab_size` or more are unused.
      edit_values: float32 `[num_seqs, max_logit_edits]`; -inf forbids the token.
      only_edits: int32 `[num_seqs]`, 1 if all tokens but those in `edit_ids` are forbidden.
      wants_logprobs: int32 `[1]`, 1 if any row wants log probabilities.
      uses_masks: int32 `[1]`, 1 if the masks that come beside the batch forbid anything.
      uses_wide_edits: int32 `[1]`, 1 if the `WideEdits` that come beside the batch are to be read.
      num_wide_biases: int32 `[1]`, the most biases that some row of them has.
    """

    temperature: Array  # [num_seqs]
    top_k: Array  # [num_seqs]
    top_p: Array  # [num_seqs]
    min_p: Array  # [num_seqs]
    presence_penalty: Array  # [num_seqs]
    frequency_penalty: Array  # [num_seqs]
    repetition_penalty: Array  # [num_seqs]
    seeds: Array  # [num_seqs, 2]
    num_prompt_tokens: Array  # [num_seqs]
    edit_ids: Array  # [num_seqs, max_logit_edits]
    edit_values: Array  # [num_seqs, max_logit_edits]
    only_edits: Array  # [num_seqs]
    wants_logprobs: Array  # [1]
    uses_masks: Array  # [1]
    uses_wide_edits: Array  # [1]
    num_wide_biases: Array  # [1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class WideEdits:
    """Logit edits of rows with more of them than a `SamplingBatch` has room for.

    Nothing reads them unless the batch says so (docs/decisions/0048).

    Attributes:
      allowed: int32 `[num_seqs, mask_words]`, a bit per token as in a mask; 0 forbids the token.
      bias_ids: int32 `[num_seqs, max_logit_biases]`, token ids whose logits get `bias_values`
        added; ids outside the vocabulary are unused, and follow those in use.
      bias_values: float32 `[num_seqs, max_logit_biases]`.
    """

    allowed: Array  # [num_seqs, mask_words]
    bias_ids: Array  # [num_seqs, max_logit_biases]
    bias_values: Array  # [num_seqs, max_logit_biases]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step returns for each sequence row.

    Log probabilities are of the raw logits (log-softmax in float32 before any processing but that
    of the masks), and hold garbage unless the batch asked for them.

    Attributes:
      token_ids: int32 `[num_seqs]`.
      logprobs: float32 `[num_seqs]`, of the sampled token.
      ranks: int32 `[num_seqs]`, number of tokens at least as likely as the sampled one (best: 1).
      top_ids: int32 `[num_seqs, max_logprobs]`, most likely tokens in descending order.
      top_logprobs: float32 `[num_seqs, max_logprobs]`.
    """

    token_ids: Array  # [num_seqs]
    logprobs: Array  # [num_seqs]
    ranks: Array  # [num_seqs]
    top_ids: Array  # [num_seqs, max_logprobs]
    top_logprobs: Array  # [num_seqs, max_logprobs]
