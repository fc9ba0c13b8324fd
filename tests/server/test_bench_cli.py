"""The options of `paged bench`, and what its random prompts are."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from paged.server.bench_prompts import longest, random_lengths, random_tokens, random_words
from paged.server.cli import build_parser, main
from paged.server.cli_settings import engine_config
from tests.server.process import ROOT

BENCHMARKS = ["throughput", "latency", "serve", "sweep", "compare"]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_help_needs_no_heavy_import(benchmark):
    script = (
        "import sys\n"
        "from paged.server.cli import main\n"
        "try:\n"
        f"    main(['bench', {benchmark!r}, '--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "heavy = {'jax', 'flax', 'numpy', 'aiohttp', 'tokenizers', 'jinja2', 'tqdm'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.endswith("\n[]\n")
    assert "(default: None)" not in run.stdout
    options = run.stdout.partition("\n\n")[2]  # below the usage, which breaks at options only
    assert max(map(len, options.splitlines())) <= 100


def test_help_names_the_benchmarks(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {benchmark} " in out for benchmark in BENCHMARKS)


@pytest.mark.parametrize("name", ["--json", "--output-json", "--output_json"])
def test_json_file_has_both_names(name, tmp_path, capsys):
    file = tmp_path / "folder" / "x"
    assert main(["bench", "throughput", name, str(file)]) == 1
    assert f"paged: error: cannot write {file}" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", ["throughput", "latency"])
def test_engine_options_are_those_of_the_other_commands(benchmark):
    flags = ["m", "--dtype", "float32", "--no-compilation-cache"]
    served = engine_config(build_parser().parse_args(["serve", *flags]))
    assert served.dtype == "float32"
    # All prompts of a benchmark are queued before its first step.
    expected = dataclasses.replace(served, prefix_cache_policy="lookahead")
    assert engine_config(build_parser().parse_args(["bench", benchmark, *flags])) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--num-prompts", "0"], "'0' is too small; give 1 or more"),
        (["latency", "--random-range-ratio", "1"], "'1' must be at least 0 and below 1"),
        (["latency", "--random-range-ratio", "x"], "'x' is no number"),
        (["serve", "--request-rate", "0"], "'0' must be above 0; inf is allowed"),
        (["serve", "--request-rate", "nan"], "'nan' must be above 0; inf is allowed"),
        (["serve", "--extra-body", "[]"], "'[]' is no JSON object; write"),
        (["serve", "--extra-body", "{"], "'{' is no JSON object; write"),
        (["serve", "--endpoint", "/v2"], "invalid choice: '/v2'"),
        (
            ["serve", "--goodput", "itl:5"],
            "'itl:5' bounds none of ttft, tpot, e2el; write ttft:500",
        ),
        (["serve", "--goodput", "ttft:0"], "'0' must be above 0"),
        (["serve", "--metadata", "x"], "'x' is no KEY=VALUE"),
        (["serve", "--multi-turn-think-time", "-1"], "'-1' must be at least 0"),
        (["throughput", "--dataset-name", "multi_turn"], "invalid choice: 'multi_turn'"),
        (["sweep", "--vary", "seed"], "'seed' is no NAME=VALUE,VALUE; write request-rate=1,2"),
        (["sweep", "--vary", "seed=1,1"], "'seed=1,1' has a value twice"),
        ([], "the following arguments are required: BENCHMARK"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_context_too_short_for_the_requests_is_one_line(capsys):
    options = ["--input-len=100", "--output-len=50", "--random-range-ratio=0.5"]
    assert main(["bench", "throughput", "--max-model-len=200", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "paged: error: --max-model-len 200 is less than the 216 tokens of the longest request; "
        "raise it, or lower --input-len or --output-len."
    )


def test_lengths_fill_their_range():
    rng = np.random.default_rng(0)
    lengths = random_lengths(rng, 2000, 10, 0.5)
    assert set(lengths) == set(range(5, 16))
    assert longest(10, 0.5) == 15
    assert random_lengths(rng, 3, 7, 0.0) == [7, 7, 7]
    assert min(random_lengths(rng, 50, 1, 0.9)) == 1


def test_tokens_come_from_the_ids_that_are_given():
    prompts = random_tokens(np.random.default_rng(0), [0, 3, 200], [5, 8])
    assert [len(prompt) for prompt in prompts] == [0, 3, 200]
    assert set(prompts[2]) == {5, 8}


def test_equal_seeds_draw_equal_prompts():
    draws = [random_words(np.random.default_rng(seed), [20]) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert len(draws[0][0].split(" ")) == 20
