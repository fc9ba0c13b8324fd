"""Outputs that nobody streams: one per sample, equal to its deltas joined."""

import pytest

from paged.scheduler.engine import Engine
from paged.scheduler.output import CompletionOutput, RequestOutput
from paged.scheduler.params import SamplingParams
from tests.scheduler.fakes import make_engine, spell

TEXT = 'é漢👍 "quoted"\n and then the end'
CASES = {
    "end of sequence": {},
    "length within a character": {"max_tokens": 4},
    "one token": {"max_tokens": 1},
    "stop token": {"stop_token_ids": [ord("q")]},
    "stop token kept": {"stop_token_ids": [ord("q")], "include_stop_str_in_output": True},
    "stop string": {"stop": ["then"]},
    "stop string kept": {"stop": ["then"], "include_stop_str_in_output": True},
    "stop string that never comes": {"stop": ["nowhere"]},
    "stop string at the last token": {"stop": ["👍"], "max_tokens": 9},
    "log probabilities": {"logprobs": 2},
    "log probabilities and a stop string": {"logprobs": 1, "stop": ["then"]},
    "samples": {"n": 3, "seed": 1},
    "past the end": {"ignore_eos": True, "max_tokens": 50},
}


def add_all(engine: Engine, *, stream: bool) -> None:
    for number, (name, settings) in enumerate(CASES.items()):
        params = SamplingParams(**{"max_tokens": 60, **settings})
        engine.add_request(name, [65 + number] * 9, params, prompt=name, stream=stream)


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step()[0]:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def joined(outputs: list[RequestOutput]) -> dict[int, CompletionOutput]:
    """Join deltas by sample, the obvious way."""
    samples: dict[int, CompletionOutput] = {}
    for output in outputs:
        for delta in output.outputs:
            before = samples.get(delta.index, CompletionOutput(delta.index, "", ()))
            logprobs = (*(before.logprobs or ()), *(delta.logprobs or ()))
            samples[delta.index] = CompletionOutput(
                index=delta.index,
                text=before.text + delta.text,
                token_ids=(*before.token_ids, *delta.token_ids),
                logprobs=logprobs or None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
    return samples


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_blocks", [400, 60])
def test_a_whole_output_is_its_deltas_joined(num_blocks, async_scheduling):
    results = []
    for stream in (True, False):
        engine = make_engine(spell(TEXT), num_blocks=num_blocks, async_scheduling=async_scheduling)
        add_all(engine, stream=stream)
        results.append(run(engine))
    deltas, wholes = results
    assert set(deltas) == set(wholes) == set(CASES)
    for name, outputs in wholes.items():
        assert len(outputs) == CASES[name].get("n", 1)
        assert all(output.prompt == name for output in outputs)
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {o.outputs[0].index: o.outputs[0] for o in outputs} == joined(deltas[name])
        assert outputs[-1].num_cached_tokens == deltas[name][0].num_cached_tokens


def test_samples_report_the_cached_tokens_of_the_one_that_ran_first():
    engine = make_engine(spell("abc"))
    # Sample 0 computes the prompt; the others find what it has computed.
    engine.add_request("r", list(range(64, 84)), SamplingParams(n=3), stream=False)
    assert [output.num_cached_tokens for output in run(engine)["r"]] == [0, 0, 0]


def test_an_aborted_request_hands_out_what_it_has():
    engine = make_engine(spell(TEXT))
    for stream in (True, False):
        for stop in ([], ["zzz"]):
            params = SamplingParams(max_tokens=40, stop=stop)
            engine.add_request(f"{stream} {stop}", [65], params, stream=stream)
    texts = dict.fromkeys(["True []", "True ['zzz']", "False []", "False ['zzz']"], "")
    for _ in range(7):
        for output in engine.step()[0]:
            texts[output.request_id] += output.outputs[0].text
    assert texts["False []"] == texts["False ['zzz']"] == ""
    for output in engine.abort(list(texts)):
        texts[output.request_id] += output.outputs[0].text
        assert output.outputs[0].finish_reason == "abort"
        assert output.finished
        if output.request_id.startswith("False"):
            assert output.outputs[0].token_ids == tuple(TEXT.encode()[:7])
    # Seven bytes: two characters, and the beginning of the third.
    assert set(texts.values()) == {"é漢\ufffd"}


def test_tokens_nobody_streams_are_not_detokenised_before_the_end():
    engine = make_engine(spell("abcdef"))
    engine.add_request("r", [65], SamplingParams(max_tokens=6), stream=False)
    outputs = [engine.step()[0] for _ in range(6)]
    assert outputs[:5] == [[]] * 5
    assert outputs[5][0].outputs[0].text == "abcdef"
