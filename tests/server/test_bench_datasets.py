"""What the datasets of `paged bench` ask for, and how it is spelt."""

import argparse
import collections
import json
import re

import numpy as np
import pytest

from paged.server.bench_bodies import CHAT, make_exchanges
from paged.server.bench_datasets import make_sessions
from paged.server.bench_spelling import TokenSpeller, WordSpeller
from paged.server.cli import build_parser, main


def parsed(*options: str) -> argparse.Namespace:
    args = build_parser().parse_args(["bench", "serve", "--model=m", *options])
    args.model = "m"
    return args


def sessions_of(*options: str, seed: int = 0):
    return make_sessions(parsed(*options), np.random.default_rng(seed))


def bodies_of(*options: str) -> list[list[dict]]:
    args = parsed(*options)
    sessions = make_sessions(args, np.random.default_rng(args.seed))
    return [[exchange.body for exchange in one] for one in make_exchanges(args, sessions)]


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def test_random_prompts_have_nothing_in_common():
    prompts = [body["prompt"] for (body,) in bodies_of("--num-prompts=20", "--input-len=50")]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20
    assert all(256 <= token < 30_000 for prompt in prompts for token in prompt)


@pytest.mark.parametrize("dataset", ["random", "sharegpt", "prefix_repetition", "cyclic"])
def test_equal_seeds_ask_for_the_same_and_others_for_something_else(dataset):
    options = ["--num-prompts=12", f"--dataset-name={dataset}"]
    first, again, other = (bodies_of(*options, f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again
    assert all(a[0]["prompt"][:4] != b[0]["prompt"][:4] for a, b in zip(first, other, strict=True))


def test_lengths_are_as_spread_as_those_of_sharegpt():
    sessions = sessions_of("--num-prompts=20000", "--dataset-name=sharegpt")
    prompts = np.array([turn.num_tokens for (turn,) in sessions])
    outputs = np.array([turn.output_len for (turn,) in sessions])
    # Medians of lognormal distributions: mean over exp(sigma² / 2), which no cut changes.
    assert np.median(prompts) == pytest.approx(161 / np.exp(1.3**2 / 2), rel=0.05)
    assert np.median(outputs) == pytest.approx(338 / np.exp(0.5), rel=0.05)
    assert (prompts.min(), prompts.max()) == (4, 1024)
    fixed = sessions_of("--dataset-name=sharegpt", "--sharegpt-output-len=7", "--num-prompts=3")
    assert [turn.output_len for (turn,) in fixed] == [7, 7, 7]


def test_prefixes_are_shared_equally_and_suffixes_are_not():
    options = ["--dataset-name=prefix_repetition", "--num-prompts=12"]
    options += ["--prefix-repetition-prefix-len=30", "--prefix-repetition-suffix-len=9"]
    options += ["--prefix-repetition-num-prefixes=3", "--prefix-repetition-output-len=5"]
    bodies = [body for (body,) in bodies_of(*options)]
    prefixes = collections.Counter(tuple(body["prompt"][:30]) for body in bodies)
    assert sorted(prefixes.values()) == [4, 4, 4]
    assert len({tuple(body["prompt"][30:]) for body in bodies}) == 12
    assert {(len(body["prompt"]), body["max_tokens"]) for body in bodies} == {(39, 5)}
    order = [tuple(body["prompt"][:30]) for body in bodies]
    assert order != order[:3] * 4
    kept = [tuple(body["prompt"][:30]) for (body,) in bodies_of(*options, "--disable-shuffle")]
    assert kept == kept[:3] * 4


def test_documents_come_in_turn_each_with_a_new_question():
    options = ["--dataset-name=cyclic", "--num-prompts=7", "--cyclic-num-documents=3"]
    options += ["--cyclic-document-len=40", "--cyclic-question-len=8", "--cyclic-output-len=2"]
    prompts = [body["prompt"] for (body,) in bodies_of(*options)]
    shared = [[common_prefix(a, b) for b in prompts] for a in prompts]
    expected = [[48 if i == j else 40 if i % 3 == j % 3 else 0 for j in range(7)] for i in range(7)]
    assert shared == expected


def test_chats_go_on_turn_by_turn_under_one_system_prompt():
    options = ["--dataset-name=multi_turn", "--num-prompts=8", "--multi-turn-num-turns=3"]
    options += ["--multi-turn-system-len=20", "--multi-turn-user-len=5", f"--endpoint={CHAT}"]
    chats = bodies_of(*options, "--multi-turn-output-len=9")
    assert [len(chat) for chat in chats] == [3, 3, 2]
    roles = [[message["role"] for message in body["messages"]] for body in chats[0]]
    assert roles == [["system", "user"], ["user"], ["user"]]
    assert len({chat[0]["messages"][0]["content"] for chat in chats}) == 1
    users = [body["messages"][-1]["content"] for chat in chats for body in chat]
    assert len(set(users)) == 8
    assert {len(text.split()) for text in users} == {5}
    assert {body["max_completion_tokens"] for chat in chats for body in chat} == {9}


def test_pauses_have_the_mean_that_is_asked_for():
    options = ["--dataset-name=multi_turn", "--num-prompts=9000", "--multi-turn-think-time=2"]
    chats = sessions_of(*options, "--multi-turn-num-turns=3")
    assert {chat[0].pause for chat in chats} == {0.0}
    assert np.mean([turn.pause for chat in chats for turn in chat[1:]]) == pytest.approx(2, rel=0.1)


@pytest.fixture
def prompt_file(tmp_path):
    def write(*lines: object):
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return f"--dataset-path={file}"

    return write


def test_prompts_of_a_file_are_taken_as_they_are(prompt_file):
    path = prompt_file({"prompt": "one", "output_tokens": 3}, "", {"prompt": "two"})
    options = ["--dataset-name=custom", path, "--disable-shuffle", "--custom-output-len=8"]
    found = [(b["prompt"], b["max_tokens"]) for (b,) in bodies_of(*options, "--num-prompts=3")]
    assert found == [("one", 3), ("two", 8), ("one", 3)]


def test_prompts_of_a_file_are_shuffled_and_each_is_used_as_often(prompt_file):
    lines = [{"prompt": f"{index}"} for index in range(20)]
    options = ["--dataset-name=custom", prompt_file(*lines), "--num-prompts=40"]
    found = [body["prompt"] for (body,) in bodies_of(*options)]
    assert set(collections.Counter(found).values()) == {2}
    assert found[:20] != [line["prompt"] for line in lines]


def test_chats_of_a_file_are_sent_as_they_are(prompt_file):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    options = ["--dataset-name=custom", prompt_file({"messages": messages}), "--num-prompts=1"]
    ((body,),) = bodies_of(*options, f"--endpoint={CHAT}")
    assert body["messages"] == messages
    ((text,),) = bodies_of(*options[:1], prompt_file({"prompt": "x"}), *options[2:],
                           f"--endpoint={CHAT}")  # fmt: skip
    assert text["messages"] == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], [], "prompts.jsonl is empty; write one JSON object"),
        (["{"], [], "prompts.jsonl, line 1: Expecting property name"),
        ([{"prompt": "a"}, [1]], [], "line 2: is no JSON object"),
        ([{"prompt": ""}], [], 'line 1: "prompt" must be a text that is not empty'),
        ([{"messages": [1]}], [], 'line 1: "prompt" must be a text that is not empty'),
        ([{"prompt": "a", "output_tokens": 0}], [], 'line 1: "output_tokens" is 0; give a number'),
        ([{"prompt": "a"}], ["--custom-output-len=-1"], '"output_tokens" is -1; give a number'),
        ([{"prompt": "a"}], ["--no-oversample"], "has 1 prompts; lower --num-prompts 2"),
        (
            [{"messages": [{"role": "user", "content": "a"}]}],
            [],
            "/v1/completions takes no chats of several messages; add --endpoint",
        ),
    ],
)
def test_mistakes_in_a_file_are_explained(prompt_file, lines, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        bodies_of("--dataset-name=custom", prompt_file(*lines), "--num-prompts=2", *options)


def test_custom_without_a_file_says_what_is_missing():
    with pytest.raises(ValueError, match="--dataset-name custom needs the file of its prompts"):
        sessions_of("--dataset-name=custom")


def test_chats_that_go_on_need_the_api_of_chats():
    with pytest.raises(ValueError, match="takes no chats of several messages; add --endpoint"):
        bodies_of("--dataset-name=multi_turn", "--num-prompts=5")


def test_chats_of_a_file_are_refused_in_process(prompt_file, capsys):
    path = prompt_file({"messages": [{"role": "user", "content": "a"}]})
    assert main(["bench", "throughput", "--dataset-name=custom", path]) == 1
    assert 'a chat ("messages") cannot be measured in this process' in capsys.readouterr().err


def test_content_of_a_name_is_the_same_wherever_it_stands():
    tokens = TokenSpeller(3, range(1000))
    whole = tokens.spell([("a", 10), (1, 5)])
    assert whole == tokens.spell([("a", 10)]) + tokens.spell([(1, 5)])
    assert tokens.spell([("1", 5)]) != tokens.spell([(1, 5)])
    assert TokenSpeller(4, range(1000)).spell([("a", 10)]) != whole[:10]
    words = WordSpeller(3)
    assert (
        words.spell([("a", 4), ("b", 2)]) == f"{words.spell([('a', 4)])} {words.spell([('b', 2)])}"
    )
