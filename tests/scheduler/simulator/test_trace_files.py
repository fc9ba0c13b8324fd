"""Traces as files: round trips, Mooncake's format, bad lines."""

import pytest

from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.conversation_traces import chat
from paged.scheduler.simulator.simulate import simulate
from paged.scheduler.simulator.trace import TraceRequest
from paged.scheduler.simulator.trace_files import (
    TraceError,
    read_jsonl,
    read_mooncake,
    write_jsonl,
)

# Two prompts as in the published traces: they share the first 512 tokens, then a third that
# continues the first one.
MOONCAKE = """\
{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1536, "output_length": 3, "hash_ids": [0, 14, 15]}

{"timestamp": 5999, "input_length": 1000, "output_length": 1, "hash_ids": [0, 1]}
"""


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "conversation.jsonl"
    path.write_text(MOONCAKE)
    return path


def test_written_trace_is_read_back_unchanged(tmp_path):
    trace = chat(sessions=5, turns=3)
    assert write_jsonl(trace, tmp_path / "chat.jsonl") == 15
    read = read_jsonl(tmp_path / "chat.jsonl")
    assert list(read) == list(trace)
    assert (read.name, read.num_requests, read.has_arrivals) == ("chat", 15, True)


def test_optional_fields_have_defaults_and_all_fields_arrive(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(
        '{"prompt": [["a", 5]], "output_tokens": 2}\n'
        '{"prompt": [[7, 1], ["b", 2]], "output_tokens": 1, "arrival_seconds": 0.5, "output": "x", '
        '"priority": -1, "pass": 2, "session": "s"}\n'
    )
    assert list(read_jsonl(path)) == [
        TraceRequest((("a", 5),), 2),
        TraceRequest(((7, 1), ("b", 2)), 1, 0.5, "x", -1, 2, "s"),
    ]


def test_mooncake_lines_become_segments_with_a_partial_last_one(mooncake):
    first, second, _ = read_mooncake(mooncake)
    assert first == TraceRequest(((0, 512), (1, 488)), 5)
    assert second == TraceRequest(((0, 512), (14, 512), (15, 512)), 3, arrival_seconds=3.0)


@pytest.mark.parametrize(
    ("block_size", "hits"),
    # The second prompt shares one entry; the third all full blocks of the first.
    [(16, 512 + 992), (512, 512 + 512), (100, 500 + 900), (1024, 0)],
)
def test_mooncake_prefixes_hit_whatever_the_block_size(mooncake, block_size: int, hits: int):
    config = SimulationConfig(num_blocks=10_000 // block_size, block_size=block_size)
    assert simulate(read_mooncake(mooncake), config).hit_tokens == hits


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"output_tokens": 1}', "line 2: no 'prompt'"),
        ('{"prompt": [["a", 0]], "output_tokens": 1}', "line 2: the prompt must have segments"),
        ('{"prompt": [], "output_tokens": 1}', "line 2: the prompt must have segments"),
        ('{"prompt": [["a", 1]], "output_tokens": 0}', "line 2: output of 0 tokens"),
        ('{"prompt": [[null, 1]], "output_tokens": 1}', "line 2: content None must be a string"),
        (
            '{"prompt": [["a", 1]], "output_tokens": 1, "arrival_seconds": 0.5}',
            "line 2: arrives at 0.5 s, before the line above; sort the lines",
        ),
        ("[", "line 2: Expecting value"),
    ],
)
def test_bad_line_is_named(tmp_path, line: str, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": [["a", 1]], "output_tokens": 1, "arrival_seconds": 1}}\n{line}\n')
    with pytest.raises(TraceError, match=message):
        list(read_jsonl(path))


def test_mooncake_line_whose_hashes_do_not_cover_the_prompt_is_refused(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(TraceError, match="1 hash_ids do not cover input_length=600"):
        list(read_mooncake(path))


def test_missing_file_is_reported_before_reading(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        read_jsonl(tmp_path / "nowhere.jsonl")
