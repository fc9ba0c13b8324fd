"""`paged simulate`: the acceptance command, tables, files, and options that do not go together."""

import json
import subprocess
import sys

import pytest

from paged.scheduler.request_queue import SCHEDULING_POLICIES
from paged.scheduler.simulator.config import SimulationConfig
from paged.server.cli import build_parser, main
from paged.server.cli_options import dashed
from tests.server.process import ROOT

REFERENCE = [
    "simulate", "--trace", "cyclic", "--documents", "10", "--document-tokens", "5033",
    "--passes", "forward,forward,reverse", "--num-blocks", "1345", "--block-size", "16",
]  # fmt: skip
SMALL = ["simulate", "--documents", "4", "--document-tokens", "1000", "--num-blocks", "100,250"]


def output(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def error(capsys, *arguments: str) -> str:
    assert main(arguments) == 1
    return capsys.readouterr().err


def test_reference_experiment_prints_its_hits_as_json(capsys):
    found = json.loads(output(capsys, *REFERENCE, "--policy", "lru", "--json"))
    assert [one["hit_tokens"] for one in found["passes"]] == [0, 0, 21488]


def test_table_has_a_line_per_policy_and_capacity(capsys):
    lines = output(capsys, *SMALL, "--passes", "3", "--policy", "lru,optimal").splitlines()
    assert lines[0].split()[:4] == ["policy", "blocks", "hit", "tokens"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["lru", "100", "0"], ["optimal", "100", "1728"],
        ["lru", "250", "7936"], ["optimal", "250", "7936"],
    ]  # fmt: skip
    assert len(set(map(len, lines))) == 1


def test_all_policies_run_once(capsys):
    found = json.loads(output(capsys, *SMALL[:-1], "100", "--policy", "lru,all", "--json"))
    names = [run["policy"] for run in found["runs"]]
    assert names[0] == "lru"
    assert {"mru", "lip", "lookahead", "optimal"} < set(names)
    assert len(set(names)) == len(names)


def test_gpu_and_model_give_times_and_the_number_of_blocks(capsys):
    arguments = ["simulate", "--passes", "1", "--gpu", "H100", "--model", "llama-3.1-8b"]
    found = json.loads(output(capsys, *arguments, "--json"))
    assert found["device"] == "h100"
    assert found["num_blocks"] > 20_000
    assert 0.08 < found["ttft"]["p50"] < 0.3
    heading, line = output(capsys, *arguments).splitlines()
    assert "TTFT p50 ms" in heading
    assert f"{1000 * found['ttft']['p50']:.1f}" in line.split()


def test_traces_are_written_and_read_back(capsys, tmp_path):
    path = tmp_path / "chat.jsonl"
    assert output(capsys, "simulate", "--trace", "chat", "--sessions", "5", "--write-trace",
                  str(path)) == ""  # fmt: skip
    chat = json.loads(output(capsys, "simulate", "--trace", "chat", "--sessions", "5",
                             "--num-blocks", "500", "--json"))  # fmt: skip
    read = json.loads(output(capsys, "simulate", "--trace", str(path), "--num-blocks", "500",
                             "--json"))  # fmt: skip
    assert read == chat


def test_format_of_a_file_is_seen_in_its_first_line(capsys, tmp_path):
    path = tmp_path / "m.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 1, "hash_ids": [7, 8]}\n'
    path.write_text(line % 0 + line % 1000)
    arguments = ["simulate", "--trace", str(path), "--num-blocks", "500", "--json"]
    assert json.loads(output(capsys, *arguments))["hit_tokens"] == 592
    assert json.loads(output(capsys, *arguments, "--trace-format", "mooncake"))["hit_tokens"] == 592
    assert "no 'prompt'" in error(capsys, *arguments, "--trace-format", "paged")


def test_request_rate_makes_an_open_loop_of_any_trace(capsys):
    arguments = ["simulate", "--passes", "2", "--num-blocks", "4000", "--json"]
    closed = json.loads(output(capsys, *arguments))
    opened = json.loads(output(capsys, *arguments, "--request-rate", "inf", "--burstiness", "0.5"))
    assert closed["e2e"]["p99"] < 4
    # All twenty at once: the last one waits for the prefills of all others.
    assert opened["e2e"]["p99"] > 20


def test_csv_is_written(capsys, tmp_path):
    output(capsys, *SMALL, "--csv", str(tmp_path / "runs.csv"))
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 3


def test_baselines_are_compared(capsys):
    arguments = ["simulate", "--trace", "poisson", "--num-requests", "400", "--concurrency", "32",
                 "--baselines", "--num-blocks"]  # fmt: skip
    found = json.loads(output(capsys, *arguments, "982", "--json"))["baselines"]
    live = {use["strategy"]: use["live"] for use in found["reservations"]}
    assert live["max"] < live["pow2"] < live["oracle"] < found["blocks"]["live"]
    # A static batch of 32 would need 32 times the longest request.
    assert "static_batching" not in found
    found = json.loads(output(capsys, *arguments, "6000", "--json"))["baselines"]
    assert found["static_batching"]["continuous_over_static"] > 1.5
    text = output(capsys, *arguments, "6000")
    assert "blocks" in text
    assert "times the throughput of static batches" in text


def test_plot_names_the_extra_that_it_needs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "paged[plot]" in error(capsys, *SMALL, "--plot", "x.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --num-blocks, or --gpu and --model to derive it from memory"),
        (["--gpu", "h100"], "--gpu and --model go together"),
        (["--gpu", "x", "--model", "llama-3.1-8b"], "gpu='x' is unknown"),
        (["--num-blocks", "9", "--trace", "nowhere.jsonl"], "--trace nowhere.jsonl is no file"),
        (["--num-blocks", "9", "--sessions", "3"], "trace 'cyclic' has no sessions"),
        (["--num-blocks", "9", "--burstiness", "0.5"], "--burstiness needs --request-rate"),
        (["--num-blocks", "9", "--policy", "fifo"], "policy 'fifo' is unknown"),
        (["--num-blocks", "9", "--passes", "up"], "passes has 'up'"),
    ],
)
def test_options_that_do_not_go_together_are_explained(capsys, arguments, message: str):
    assert message in error(capsys, "simulate", *arguments)


def test_option_of_another_trace_is_refused_for_a_file(capsys, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": [["a", 5]], "output_tokens": 2}\n')
    message = error(capsys, "simulate", "--trace", str(path), "--document-tokens", "9")
    assert "--document-tokens does not apply to a trace file" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lru,"], "empty name between its commas"),
        (["--num-blocks", "x"], "is no size"),
    ],
)
def test_values_that_cannot_be_parsed_exit_with_2(capsys, arguments, message: str):
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_every_scheduling_policy_is_offered(capsys, policy: str):
    output(capsys, *SMALL, "--scheduling-policy", policy)


def test_defaults_are_those_of_the_configuration():
    args = build_parser().parse_args(dashed(["simulate", "--num_blocks=1k"]))
    config = SimulationConfig(1000)
    assert (args.num_blocks, args.policy) == ([config.num_blocks], [config.policy])
    for name in (
        "block_size", "concurrency", "num_queued", "max_num_seqs", "max_num_batched_tokens",
        "max_model_len", "scheduling_policy", "long_prefill_token_threshold",
        "enable_chunked_prefill", "enable_prefix_caching",
    ):  # fmt: skip
        assert getattr(args, name) == getattr(config, name), name


def test_parsing_and_a_run_without_a_gpu_load_no_jax():
    code = (
        "import sys; from paged.server.cli import main; "
        f"main({[*SMALL, '--json']!r}); sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
