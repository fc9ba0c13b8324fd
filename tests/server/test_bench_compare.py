"""`paged bench compare`: ratios, verdicts, medians of folders, and what differed."""

import json
import re

import pytest

from paged.server.cli import main

BASE = {
    "request_throughput": 10.0,
    "output_throughput": 100.0,
    "mean_ttft_ms": 50.0,
    "median_tpot_ms": 20.0,
    "error_rate": 0.0,
    "request_goodput": None,
    "num_prompts": 8,
    "settings": {"seed": 1, "engine": {"block_size": 16}},
    "versions": {"paged": "1"},
}


@pytest.fixture
def write(tmp_path):
    def write(name: str, **changes: object) -> str:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(BASE | changes))
        return str(file)

    return write


def rows(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}


def test_verdicts_know_which_way_is_better(write, capsys):
    first = write("a.json")
    changes = {"output_throughput": 110.0, "mean_ttft_ms": 55.0, "median_tpot_ms": 10.0}
    second = write("b.json", request_throughput=9.8, error_rate=0.1, **changes)
    assert main(["bench", "compare", first, second]) == 0
    found = rows(capsys.readouterr().out)
    assert found["request_throughput"] == ["10.00", "9.80", "-2.0", "same"]
    assert found["output_throughput"] == ["100.00", "110.00", "+10.0", "better"]
    assert found["mean_ttft_ms"] == ["50.00", "55.00", "+10.0", "worse"]
    assert found["median_tpot_ms"] == ["20.00", "10.00", "-50.0", "better"]
    assert found["error_rate"] == ["0.00", "0.10", "-", "worse"]
    assert "request_goodput" not in found


def test_status_says_whether_something_is_worse(write):
    first, second = write("a.json"), write("b.json", mean_ttft_ms=54.0)
    assert main(["bench", "compare", first, second, "--fail-if-worse"]) == 3
    assert main(["bench", "compare", second, first, "--fail-if-worse"]) == 0
    assert main(["bench", "compare", first, second, "--fail-if-worse", "--tolerance=9"]) == 0


def test_folders_count_with_the_medians_of_their_runs(write, tmp_path, capsys):
    for run, (a, b) in enumerate([(1.0, 9.0), (5.0, 10.0), (90.0, 20.0)]):
        write(f"a/{run}.json", mean_ttft_ms=a)
        write(f"b/{run}.json", mean_ttft_ms=b)
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "Medians of 3 and 3 runs" in out
    assert rows(out)["mean_ttft_ms"] == ["5.00", "10.00", "+100.0", "worse"]


def test_what_was_asked_otherwise_is_named(write, capsys):
    first = write("a.json")
    settings = {"seed": 2, "engine": {"block_size": 32}, "only_here": 1}
    second = write("b.json", num_prompts=9, settings=settings, versions={"paged": "2"})
    assert main(["bench", "compare", first, second]) == 0
    below = capsys.readouterr().out.partition("Not the same on both sides:")[2]
    assert [re.split(r" {2,}", line.strip()) for line in below.strip().splitlines()] == [
        ["A", "B"],
        ["num_prompts", "8", "9"],
        ["seed", "1", "2"],
        ["engine.block_size", "16", "32"],
        ["version of paged", "1", "2"],
    ]


def test_results_of_vllm_can_be_read(write, tmp_path, capsys):
    # What `vllm bench serve --save-result` of version 0.32.0 writes, shortened.
    theirs = {
        "backend": "openai", "model_id": "m", "num_prompts": 8, "request_rate": "inf",
        "duration": 2.0, "completed": 8, "failed": 0, "total_input_tokens": 64,
        "request_throughput": 5.0, "request_goodput": None, "output_throughput": 50.0,
        "mean_ttft_ms": 100.0, "median_tpot_ms": 20.2, "p99_itl_ms": 3.0,
    }  # fmt: skip
    file = tmp_path / "vllm.json"
    file.write_text(json.dumps(theirs))
    assert main(["bench", "compare", str(file), write("b.json")]) == 0
    found = rows(capsys.readouterr().out)
    assert found["request_throughput"] == ["5.00", "10.00", "+100.0", "better"]
    assert found["median_tpot_ms"][-1] == "same"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "x.json is no JSON: "),
        ("[]", "x.json has no figures of a benchmark; write it with --json."),
        ('{"points": []}', "x.json is a sweep; compare results of `serve` at one load."),
        ('{"p99_e2el_ms": 1.0}', "have no figure in common."),
        (None, "x.json"),
    ],
)
def test_files_that_cannot_be_compared_are_one_line(write, tmp_path, capsys, content, message):
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    assert main(["bench", "compare", write("a.json"), str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_folder_without_results_is_one_line(write, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["bench", "compare", str(tmp_path / "empty"), write("a.json")]) == 1
    assert "empty has no JSON files; write results there" in capsys.readouterr().err
