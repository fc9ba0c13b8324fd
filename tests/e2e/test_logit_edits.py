"""Requests with any number of biases, bans and stops take the tokens that numpy says they must."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paged.models.compilation import CompilationCounter
from paged.scheduler.engine import Engine
from paged.scheduler.params import SamplingParams
from tests.e2e.test_structured_outputs import PROMPT, run_all

VOCAB_SIZE = 256
# Some of them occur in what the model says.
PAIRS = [first + chr(second) for first in "BCPMY=2" for second in range(48, 91)]


def logits_after(engine: Engine, contexts: Sequence[list[int]]) -> np.ndarray:
    """What the model says of every token, `[num_contexts, vocab_size]`, up to a constant each."""
    halves = [list(range(i, i + 128)) for i in (0, 128)]
    requests = [
        (
            context,
            SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=ids),
        )
        for context in contexts
        for ids in halves
    ]
    logits = np.empty((len(contexts), VOCAB_SIZE))
    for number, (sample,) in enumerate(run_all(engine, requests)):
        context, half = divmod(number, 2)
        for token_id in halves[half]:
            logits[context, token_id] = sample.logprobs[0][token_id].logprob
    return logits


BIAS = {i: (-1.0) ** i * (i % 7) for i in range(0, 255, 2)}
CASES = {
    "few": {"logit_bias": {98: 3.0, 66: -5.0}, "bad_words": ["a"], "min_tokens": 9},
    "biases": {"logit_bias": BIAS},
    "allow-list": {"allowed_token_ids": list(range(30, 130))},
    "biased allow-list": {"allowed_token_ids": list(range(3, 200, 2)), "logit_bias": BIAS},
    "bad words": {"bad_words": PAIRS},
    "stops": {"stop_token_ids": list(range(40, 240)), "min_tokens": 12},
    "all": {
        "allowed_token_ids": list(range(20, 240)),
        "logit_bias": BIAS,
        "bad_words": ["a", "B", *PAIRS[::3]],
        "stop_token_ids": list(range(100, 140)),
        "min_tokens": 6,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_the_best_that_the_edits_leave(
    make_tiny: Callable[..., Engine], name: str
):
    fields = CASES[name]
    engine = make_tiny()
    params = SamplingParams(temperature=0, max_tokens=14, **fields)
    with CompilationCounter() as compiled:
        ((sample,),) = run_all(engine, [(PROMPT, params)])
    assert compiled.count == 0
    tokens = list(sample.token_ids)
    assert len(tokens) >= fields.get("min_tokens", 1)
    logits = logits_after(engine, [PROMPT + tokens[:i] for i in range(len(tokens))])
    edited = logits.copy()
    for token_id, value in fields.get("logit_bias", {}).items():
        edited[:, token_id] += value
    allowed = fields.get("allowed_token_ids", range(VOCAB_SIZE))
    edited[:, sorted(set(range(VOCAB_SIZE)) - set(allowed))] = -np.inf
    stops = {*fields.get("stop_token_ids", ()), *engine.tokenizer.eos_token_ids}
    for i, row in enumerate(edited):
        for word in fields.get("bad_words", ()):
            *before, last = word.encode()
            if tokens[:i][i - len(before) :] == before:
                row[last] = -np.inf
        if i < fields.get("min_tokens", 0):
            row[sorted(stops)] = -np.inf
        assert row[tokens[i]] == pytest.approx(row.max(), abs=1e-4), i
    assert np.isfinite(logits).all()
    # The edits decide: without them it is another text.
    ((plain,),) = run_all(engine, [(PROMPT, SamplingParams(temperature=0, max_tokens=14))])
    assert name == "stops" or plain.token_ids != sample.token_ids
