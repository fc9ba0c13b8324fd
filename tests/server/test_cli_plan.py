"""`paged plan`: the acceptance command, tables, every kind of MODEL, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paged.server.cli import main
from tests.models.gguf_writing import convert_to_gguf
from tests.server.process import ROOT

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = ROOT / "tests/data/golden/tiny"
FIGURES = ["--gpu-memory", "16", "--bandwidth", "25", "--tflops", "0.5"]


def test_latent_attention_is_named_as_such(capsys):
    text = output(capsys, TINY / "deepseek_v3", "--input-len", 128)
    assert "2 layers, 4 heads, one latent vector of 32 + 8 per token" in text
    assert "0.15625 KiB per token in bfloat16" in text


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path


def output(capsys, *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def error(capsys, *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_json_holds_integers_of_bytes(capsys, directory):
    found = json.loads(output(capsys, directory, "--gpu", "h100", "--json"))
    assert found["bytes_per_token"] == 57344
    assert isinstance(found["bytes_per_token"], int)
    assert found["model"]["parameters"] == 7_615_616_512
    (gpu,) = found["gpus"]
    assert round(gpu["ridge_flop_per_byte"]) == 295
    (chosen,) = [one for one in gpu["placements"] if one["is_chosen"]]
    assert (chosen["tensor_parallel_size"], chosen["weights"]) == (1, "bfloat16")
    assert chosen["weight_bytes_per_gpu"] == 2 * 7_615_616_512
    assert chosen["kv_bytes_per_gpu"] == chosen["num_blocks"] * 16 * 57344
    rates = [one["tokens_per_second"] for one in gpu["chosen"]["decode"]]
    assert rates == sorted(rates)
    assert "not a measurement" in found["assumptions"]["method"]


def test_the_file_itself_and_its_folder_are_the_same_model(capsys, directory):
    ends = ["--gpu", "l4", "--json", "-tp", "1", "--quantization", "int8"]
    first, second = (
        json.loads(output(capsys, path, *ends)) for path in (directory, directory / "config.json")
    )
    assert first["gpus"] == second["gpus"]


def test_gguf_files_are_models_too(capsys, tmp_path):
    path = convert_to_gguf(TINY / "llama3_rope", TINY / "tokenizer", tmp_path / "tiny.gguf")
    ends = ["--json", *FIGURES, "--input-len", "8", "--output-len", "8", "-tp", "1"]
    from_file = json.loads(output(capsys, path, *ends))
    from_folder = json.loads(output(capsys, TINY / "llama3_rope", *ends))
    for fields in (from_file, from_folder):
        fields["model"].pop("name")
    assert from_file == from_folder


def test_report_names_sizes_knee_flags_and_assumptions(capsys, directory):
    text = output(capsys, directory, "--gpu", "h100", "-tp", "1", "--input-len", "4608")
    assert "7.62 B parameters" in text
    assert "56 KiB per token in bfloat16: 0.2598 GiB for a request of 4,864 tokens" in text
    assert "ridge point 295 FLOP/byte" in text
    for heading in ("WHAT FITS", "PREFILL of one prompt", "DECODE at", "SUGGESTED FLAGS"):
        assert heading in text
    assert "Knee at " in text
    assert f"paged serve {directory} \\\n" in text
    assert "not measurements: they assume that a step reaches\n60% of the arithmetic" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("1 ")]
    assert [row[1] for row in rows[:4]] == ["bfloat16", "int8", "fp8", "int4"]
    assert rows[0][-1] == "*"


def test_without_a_gpu_all_are_compared(capsys):
    text = output(capsys, "qwen2.5-1.5b", "-tp", "1", "--quantization", "int8")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if " 1 " in line}
    assert {"a100", "l4", "l40s", "h100", "h200", "b200", "rtx-4090", "rtx-5090"} <= set(rows)
    assert rows["h100"][2] == "295"


def test_own_figures_and_assumptions_enter(capsys):
    ends = ["--json", *FIGURES, "-tp", "1", "--memory-efficiency", "1", "--step-overhead", "0"]
    (gpu,) = json.loads(output(capsys, *ends))["gpus"]
    assert gpu["ridge_flop_per_byte"] == 20
    # SmolLM2's tied weights, all but nothing, and 1,153 tokens of 22.5 KiB at 25 GB/s.
    (one, *_) = gpu["chosen"]["decode"]
    assert one["seconds"] == pytest.approx((2 * 134_515_008 + 1153 * 23040) / 25e9, rel=0.001)


def test_what_fits_nowhere_is_said(capsys):
    text = output(capsys, "llama-3.1-405b", "--gpu", "l4", "-tp", "8", "--quantization", "int8")
    assert "Not one request of 1,280 tokens fits on 8 of these GPUs: take larger ones" in text
    assert "SUGGESTED" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-9"], "model='gpt-9' is neither a file or folder nor one of llama-3.1-8b"),
        (["org/name:x.gguf"], "the shape of a GGUF file on the Hub is known only once all of it"),
        (["--gpu", "abacus"], "gpu='abacus' is unknown; known are a100-40gb"),
        (["--tflops", "3"], "--gpu-memory, --bandwidth missing"),
        (["--input-len", "9000"], "exceeds the 8192 positions that the model was made for"),
        (["--shared-prefix-len", "1024"], "shared_prefix_len=1024 must be at least 0 and below"),
        ([str(TINY)], "has no config.json"),
    ],
)
def test_what_cannot_be_planned_is_one_line(capsys, arguments, message):
    assert message in error(capsys, *arguments)


def test_a_cached_model_of_the_hub_needs_its_config_alone(tmp_path):
    """In a process of its own, which cannot reach the Hub."""
    folder = tmp_path / "hub/models--org--name"
    snapshot = folder / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0123456789" * 4)
    (snapshot / "config.json").write_text(json.dumps(QWEN_7B))
    command = [
        sys.executable, "-m", "paged.server.cli", "plan", "org/name", "--gpu", "h100", "--json",
        "--quantization", "int8", "-tp", "1",
    ]  # fmt: skip
    environment = {
        "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "JAX_PLATFORMS": "cpu",
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path),
    }  # fmt: skip
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(run.stdout)["bytes_per_token"] == 57344
