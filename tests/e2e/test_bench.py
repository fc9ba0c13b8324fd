"""`paged bench throughput`, `latency` and `sweep` on the tiny llama."""

import json
import urllib.error
import urllib.request

import pytest

from paged.server.bench_names import METRICS
from paged.server.cli import main


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory) -> list[str]:
    cache = tmp_path_factory.mktemp("xla")
    return [
        str(tiny_model), "--dtype=float32", "--max-model-len=64", "--max-num-seqs=4",
        "--max-num-batched-tokens=64", "--block-size=8", "--num-gpu-blocks-override=65",
        "--disable-tqdm", f"--compilation-cache-dir={cache}",
    ]  # fmt: skip


def test_throughput_is_tokens_over_seconds(options, tmp_path, capsys):
    file = tmp_path / "result.json"
    load = ["--num-prompts=6", "--input-len=20", "--output-len=8", f"--json={file}"]
    assert main(["bench", "throughput", *options, *load]) == 0
    result = json.loads(file.read_text())
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 48)
    assert result["num_requests"] == 6
    seconds = result["elapsed_time"]
    assert result["output_tokens_per_second"] == pytest.approx(48 / seconds)
    assert result["total_tokens_per_second"] == pytest.approx(168 / seconds)
    assert result["requests_per_second"] == pytest.approx(6 / seconds)
    assert result["cached_prompt_tokens"] == 0
    for metric in METRICS:
        low, middle, high = (result[f"p{p}_{metric}_ms"] for p in (50, 95, 99))
        assert 0 < low <= middle <= high <= 1e3 * seconds
    assert result["settings"]["random_input_len"] == 20
    assert result["settings"]["platform"] == "cpu"
    assert result["settings"]["engine"]["block_size"] == 8
    assert "jax" in result["versions"]
    assert "Output tokens per second:" in capsys.readouterr().out


def test_latency_is_that_of_whole_batches(options, tmp_path, capsys):
    file = tmp_path / "result.json"
    load = ["--batch-size=2", "--num-iters=3", "--num-iters-warmup=1", "--input-len=20"]
    assert main(["bench", "latency", *options, *load, "--output-len=4", f"--json={file}"]) == 0
    result = json.loads(file.read_text())
    latencies = result["latencies"]
    assert len(latencies) == 3
    assert result["avg_latency"] == pytest.approx(sum(latencies) / 3)
    assert result["percentiles"]["50"] == sorted(latencies)[1]
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert 0 < result["p50_ttft_ms"] < result["p50_e2el_ms"] <= 1e3 * max(latencies)
    assert "p99 latency of a batch (ms):" in capsys.readouterr().out


def test_model_that_does_not_exist_is_one_line(capsys):
    assert main(["bench", "throughput", "no/such/folder/x.gguf"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Loading no/such/folder/x.gguf ...",
        "paged: error: no/such/folder/x.gguf does not exist; pass a local directory, a GGUF file "
        "or a Hugging Face model id (organisation/name).",
    ]


@pytest.mark.slow
def test_servers_are_started_for_every_setting_and_stopped(tiny_model, tmp_path, capsys):
    file = tmp_path / "sweep.json"
    arguments = f"{tiny_model} --dtype float32 --max-model-len 64 --block-size 8"
    arguments += f" --num-gpu-blocks-override 65 --compilation-cache-dir {tmp_path}"
    options = ["--serve-args", arguments, "--vary-server", "max-num-seqs=1,4", "--num-prompts=4"]
    options += ["--vary", "max-concurrency=1,4", f"--json={file}"]
    options += [
        "--vocab-size=250",
        "--random-input-len=10",
        "--random-output-len=4",
        "--disable-tqdm",
    ]
    assert main(["bench", "sweep", *options, "--ignore-eos"]) == 0
    points = json.loads(file.read_text())["points"]
    assert [tuple(point["values"].values()) for point in points] == [
        ("1", "1"), ("4", "1"), ("1", "4"), ("4", "4")
    ]  # fmt: skip
    assert {point["completed"] for point in points} == {4}
    assert len({point["base_url"] for point in points}) == 2
    for point in points:
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(point["base_url"], timeout=5)
    assert capsys.readouterr().err.count("Starting paged serve --max-num-seqs=") == 2
