"""Diagnoses from two readings, against states that are described by hand."""

import json

import pytest

from paged.server.cli import main
from paged.server.doctor import Reading, diagnose, parse_metrics
from paged.server.prompt_difference import compare_prompts

CONFIG = {
    "block_size": "16",
    "max_num_batched_tokens": "2048",
    "max_num_seqs": "8",
    "num_gpu_blocks": "1000",
}


def reading(**values: float) -> Reading:
    quiet = {"num_requests_running": 8.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.4}
    return Reading(quiet | values, CONFIG)


FULL = {"kv_cache_usage_perc": 0.97, "num_requests_running": 5.0}
QUEUE = {"num_requests_waiting": 6.0}


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (FULL | QUEUE, FULL | QUEUE | {"num_preemptions": 3.0}, "kv_memory"),
        # Full without preemptions: requests wait for blocks before they start.
        (FULL | QUEUE, FULL | QUEUE, "kv_memory"),
        # Preemptions without a queue: those that run take each other's blocks.
        (FULL, FULL | {"num_preemptions": 1.0}, "kv_memory"),
        # A preemption has just made room.
        (QUEUE, QUEUE | {"num_preemptions": 1.0}, "kv_memory"),
        # A full cache in which nobody waits is a well used one.
        (FULL, FULL | {"generation_tokens": 5.0}, "healthy"),
        (QUEUE, QUEUE, "batch_size"),
        # A queue at one moment only is a burst.
        ({}, QUEUE | {"generation_tokens": 9.0}, "healthy"),
        (
            QUEUE | {"num_requests_running": 3.0},
            QUEUE
            | {
                "num_requests_running": 4.0,
                "iteration_tokens_total_sum": 20_000.0,
                "iteration_tokens_total_count": 10.0,
            },
            "token_budget",
        ),
        (
            {},
            {"prefix_cache_queries": 1000.0, "prefix_cache_hits": 100.0},
            "different_prompts",
        ),
        (
            {},
            {"prefix_cache_queries": 1000.0, "prefix_cache_evicted_queries": 640.0},
            "working_set",
        ),
        # What came from host memory was found.
        (
            {},
            {
                "prefix_cache_queries": 1000.0,
                "external_prefix_cache_hits": 300.0,
                "generation_tokens": 5.0,
            },
            "healthy",
        ),
        ({"prefix_cache_queries": 9000.0}, {"prefix_cache_queries": 9100.0}, "healthy"),
        ({}, {"admission_rejections": 4.0}, "rejections"),
        ({"num_requests_running": 0.0}, {"num_requests_running": 0.0}, "idle"),
    ],
)
def test_first_finding(first, second, name):
    (finding, *_) = diagnose(reading(**first), reading(**second), seconds=10.0)
    assert finding.name == name
    assert finding.evidence
    assert finding.advice or finding.name == "healthy"


def test_evidence_has_the_figures_and_advice_the_flag():
    before = reading(**FULL, **QUEUE, num_preemptions=2.0, preemption_discarded_tokens=100.0)
    after = reading(**FULL, **QUEUE, num_preemptions=9.0, preemption_discarded_tokens=1400.0)
    (finding,) = diagnose(before, after, seconds=10.0)
    evidence, advice = " ".join(finding.evidence), " ".join(finding.advice)
    assert "97%" in evidence
    assert "7 preemptions" in evidence
    assert "1,300 computed tokens" in evidence
    assert "--gpu-memory-utilization" in advice
    assert "--max-num-seqs (now 8)" in advice


def test_several_findings_are_told_together():
    after = reading(**QUEUE, prefix_cache_queries=1000.0, admission_rejections=1.0)
    names = [finding.name for finding in diagnose(reading(**QUEUE), after, seconds=1.0)]
    assert names == ["batch_size", "rejections", "different_prompts"]


def test_a_batch_that_was_full_in_between_is_full():
    # All requests of a batch end in one step, and a reading falls between that and the next one.
    few = QUEUE | {"num_requests_running": 2.0}
    (finding,) = diagnose(reading(**few), reading(**few), 1.0, [reading(**QUEUE)])
    assert "The limit on concurrent requests is the bottleneck" in finding.summary
    (finding,) = diagnose(reading(**few), reading(**few), 1.0, [reading(**few)])
    assert "a limit of the batch holds them back" in finding.summary


@pytest.mark.parametrize("is_told", [True, False])
def test_a_batch_that_is_not_quite_full_when_it_is_counted_names_both_limits(is_told):
    almost = reading(**QUEUE, num_requests_running=7.0)
    if not is_told:
        almost = Reading(almost.values)
    (finding,) = diagnose(almost, almost, 2.0)
    assert finding.name == "batch_size"
    seqs, budget = (" (now 8)", " (now 2048)") if is_told else ("", "")
    assert f"--max-num-seqs{seqs};" in finding.advice[0]
    assert f"--max-num-batched-tokens{budget}." in finding.advice[0]


def test_counters_that_start_anew_count_from_zero():
    after = reading(num_preemptions=1.0, **FULL)
    (finding,) = diagnose(reading(num_preemptions=50.0, **FULL), after, seconds=1.0)
    assert "1 preemptions" in " ".join(finding.evidence)


PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="None"} 1.0
"""


def test_pages_of_vllm_are_read_and_summed_over_engines():
    page = parse_metrics(PAGE)
    assert page.get("num_requests_running") == 5
    assert page.get("num_preemptions") == 7
    assert page.get("time_to_first_token_seconds_sum") == 1.5
    assert page.setting("block_size") == 16
    assert page.setting("num_gpu_blocks") is None


def test_other_pages_are_refused():
    with pytest.raises(ValueError, match="no vllm:num_requests_running"):
        parse_metrics("# TYPE up gauge\nup 1.0\n")


@pytest.mark.parametrize(
    ("first", "second", "equal", "shared", "tokens"),
    [
        ("abcdefgh", "abcdeXgh", 5, 4, ("f", "X")),
        ("Xbc", "abc", 0, 0, ("X", "a")),
        ("abcd", "abcd", 4, 0, ("", "")),  # the last token has to be computed
        ("abcd", "abcdefghi", 4, 4, ("", "e")),
        ("", "a", 0, 0, ("", "a")),
    ],
)
def test_where_prompts_part(first, second, equal, shared, tokens):
    difference = compare_prompts(list(first), list(second), block_size=4)
    assert difference.num_equal == equal
    assert difference.num_shared == shared
    assert difference.tokens == tokens
    assert difference.before == first[:equal]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "no address; write http"),
        ("http://127.0.0.1:9", "cannot be read"),
    ],
)
def test_unreachable_servers_end_in_one_line(url, message, capsys):
    assert main(["doctor", url, "--seconds", "0"]) == 1
    assert message in capsys.readouterr().err


def test_bodies_without_a_prompt_are_refused(tmp_path, capsys):
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"input": "hello"}))
    status = main(["doctor", "http://127.0.0.1:9", "--compare", str(body), str(body)])
    assert status == 1
    assert "without `messages`" in capsys.readouterr().err
