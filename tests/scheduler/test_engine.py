"""The engine around scheduler, runner and detokenisers, with scripted tokens."""

import pytest

from paged.scheduler.errors import CapacityError
from paged.scheduler.output import CompletionOutput, RequestOutput
from paged.scheduler.params import ParameterError, SamplingParams
from tests.scheduler.fakes import make_engine, spell


def finish(engine) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; return the outputs by request id."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(1000):
        if not engine.has_unfinished:
            return outputs
        for output in engine.step()[0]:
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine does not come to an end")


def run(text: str, params: SamplingParams, **settings) -> list[CompletionOutput]:
    engine = make_engine(spell(text), **settings)
    engine.add_request("r", [65, 66, 67], params)
    (outputs,) = finish(engine).values()
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert engine.scheduler.kv_cache_usage == 0
    return [o.outputs[0] for o in outputs]


def text_of(deltas) -> str:
    return "".join(delta.text for delta in deltas)


def test_deltas_join_to_the_text_and_eos_is_not_in_it():
    deltas = run("Hello", SamplingParams(max_tokens=20))
    assert text_of(deltas) == "Hello"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason is None
    assert [i for d in deltas for i in d.token_ids] == [*b"Hello", 2]


def test_length_ends_a_request_at_max_tokens_exactly():
    deltas = run("abcdef", SamplingParams(max_tokens=4))
    assert text_of(deltas) == "abcd"
    assert deltas[-1].finish_reason == "length"


def test_eos_at_the_last_allowed_token_is_a_stop():
    assert run("abc", SamplingParams(max_tokens=4))[-1].finish_reason == "stop"


def test_stop_token_id_is_reported_and_left_out_of_the_text():
    deltas = run("abc.def", SamplingParams(max_tokens=20, stop_token_ids=[ord(".")]))
    assert text_of(deltas) == "abc"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", ord("."))


def test_stop_token_can_be_kept_in_the_text():
    params = SamplingParams(
        max_tokens=20, stop_token_ids=[ord(".")], include_stop_str_in_output=True
    )
    assert text_of(run("abc.def", params)) == "abc."


def test_stop_string_over_token_boundaries_never_leaks():
    deltas = run("one two three", SamplingParams(max_tokens=20, stop=["o t"]))
    assert text_of(deltas) == "one tw"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "o t")


def test_stop_string_completed_by_the_last_allowed_token_is_a_stop():
    deltas = run("abcd", SamplingParams(max_tokens=4, stop=["cd"]))
    assert text_of(deltas) == "ab"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "cd")


def test_held_back_text_comes_out_at_the_end():
    assert text_of(run("abc", SamplingParams(max_tokens=3, stop=["cxxx"]))) == "abc"


def test_no_half_character_is_emitted():
    deltas = run("é漢👍", SamplingParams(max_tokens=20))
    assert text_of(deltas) == "é漢👍"
    assert not any("\ufffd" in delta.text for delta in deltas)


def test_logprobs_start_with_the_sampled_token_and_join_to_the_text():
    deltas = run("hé", SamplingParams(max_tokens=3, logprobs=2))
    positions = [position for delta in deltas for position in delta.logprobs]
    assert [next(iter(position)) for position in positions] == list("hé".encode())
    texts = [next(iter(position.values())).decoded_token for position in positions]
    assert texts == ["h", "", "é"]
    assert list(positions[0]) == [ord("h"), ord("x")]
    assert positions[0][ord("x")].rank == 2


def test_samples_of_one_request_end_together_and_share_the_prompt_blocks():
    engine = make_engine(spell("ab"))
    engine.add_request("r", list(range(64, 80)), SamplingParams(n=3, max_tokens=8))
    outputs, stats = engine.step()
    # 16 prompt tokens in blocks of 4: the first sample computes all, the others but the last block.
    assert stats.step_tokens == (16 + 4 + 4,)
    rest = finish(engine)["r"]
    assert [o.finished for o in rest].count(True) == 1
    assert {o.outputs[0].index for o in outputs + rest} == {0, 1, 2}


def test_abort_frees_the_blocks_and_says_so():
    engine = make_engine(spell("a" * 50))
    engine.add_request("r", [65], SamplingParams(n=2, max_tokens=40))
    engine.step()
    outputs = engine.abort(["r", "unknown"])
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort", "abort"]
    assert outputs[-1].finished
    assert not engine.has_unfinished
    assert engine.scheduler.kv_cache_usage == 0


def test_an_id_is_free_again_once_its_request_has_ended():
    engine = make_engine(spell("a"))
    engine.add_request("r", [65], SamplingParams())
    with pytest.raises(ValueError, match="'r' is not finished yet; use another request_id"):
        engine.add_request("r", [65], SamplingParams())
    finish(engine)
    engine.add_request("r", [65], SamplingParams())


def test_an_id_that_a_sample_of_another_request_has_is_refused():
    engine = make_engine(spell("a"))
    engine.add_request("r", [65], SamplingParams(n=2))  # its samples are 0_r and 1_r
    with pytest.raises(ValueError, match="'1_r' is not finished yet"):
        engine.add_request("1_r", [65], SamplingParams())
    assert engine.num_unfinished == 2
    finish(engine)


def test_a_prompt_that_no_pool_can_hold_is_refused_and_leaves_nothing_behind():
    engine = make_engine(spell("a"), num_blocks=5, max_model_len=128)
    with pytest.raises(CapacityError, match="num_tokens=101 needs 26 KV blocks"):
        engine.add_request("r", [65] * 100, SamplingParams())
    assert not engine.has_unfinished
    engine.add_request("r", [65], SamplingParams())


def test_bad_input_leaves_nothing_behind():
    engine = make_engine(spell("a"))
    with pytest.raises(ParameterError, match="prompt must hold at least one token"):
        engine.add_request("r", [], SamplingParams())
    assert not engine.has_unfinished
    engine.add_request("r", [65], SamplingParams())


def test_stats_add_up_over_chunks_preemption_and_cache_hits():
    # 12 usable blocks of 4 for four requests that grow to 7 blocks each: preemption is certain.
    engine = make_engine(spell("a" * 100), num_blocks=13, max_model_len=40, token_budget=16)
    for number in range(4):
        engine.add_request(str(number), [70 + number] * 10, SamplingParams(max_tokens=16))
    totals = dict.fromkeys(("generated", "prompt", "queries", "hits", "preempted"), 0)
    finished, ttft, itl = [], [], []
    while engine.has_unfinished:
        _, stats = engine.step()
        totals["generated"] += stats.num_generation_tokens
        totals["prompt"] += stats.num_prompt_tokens
        totals["queries"] += stats.prefix_queries
        totals["hits"] += stats.prefix_hits
        totals["preempted"] += stats.num_preempted
        finished += stats.finished
        ttft += stats.ttft_seconds
        itl += stats.itl_seconds
    assert totals["preempted"] > 0
    assert totals["generated"] == 4 * 16
    assert totals["prompt"] == totals["queries"] == 4 * 10
    assert totals["hits"] == 0  # what a preempted request finds again is its own work
    assert len(ttft) == 4
    assert len(itl) == 4 * 15
    assert [f.num_generation_tokens for f in finished] == [16] * 4
    assert sum(f.num_preemptions for f in finished) == totals["preempted"]
    assert all(f.e2e_seconds >= f.inference_seconds >= f.decode_seconds >= 0 for f in finished)


def test_close_releases_runner_and_requests():
    engine = make_engine(spell("a"))
    engine.add_request("r", [65], SamplingParams())
    engine.close()
    assert engine.runner.closed
    assert not engine.has_unfinished
