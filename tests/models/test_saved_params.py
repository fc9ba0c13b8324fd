"""`paged convert` keeps a model as it is, and a folder that is damaged says so."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from paged.models.checkpoint import SavedCheckpoint, open_checkpoint
from paged.models.config import ModelConfig
from paged.models.convert import convert_checkpoint
from paged.models.errors import CheckpointError
from paged.models.forward import abstract_model, dense_logits
from paged.models.library import load
from paged.models.saved_params import restore_params, save_params
from paged.models.tensor_parallel import TensorParallel
from paged.models.weights import SafetensorsSource, load_params
from paged.sharding import tensor_parallel_mesh
from tests.models.dense import random_params
from tests.models.test_decoder import CONFIG


def tiny_directory(data_dir: Path, name: str, folder: Path) -> Path:
    """A Hugging Face directory of a golden model with the byte tokenizer."""
    golden = data_dir / "golden" / "tiny"
    folder.mkdir()
    for source in (golden / "tokenizer", golden / name):
        for file in source.iterdir():
            shutil.copy(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of float32 parameters of CONFIG."""
    folder = tmp_path_factory.mktemp("saved") / "params"
    save_params(random_params(CONFIG), folder)
    return folder


def assert_equal(params: nnx.State, expected: nnx.State) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(params), nnx.to_flat_state(expected), strict=True
    ):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a[...]), np.asarray(b[...]), err_msg=str(path))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("phi3", None), ("gpt_oss_mxfp4", None), ("llama", "int4"), ("qwen2", "int8")],
)
def test_converted_model_is_the_model(
    data_dir: Path, tmp_path: Path, name: str, quantization: str | None
) -> None:
    source = tiny_directory(data_dir, name, tmp_path / "hf")
    convert_checkpoint(
        open_checkpoint(str(source)), tmp_path / "out", quantization=quantization, progress=False
    )
    converted = open_checkpoint(str(tmp_path / "out"))
    assert isinstance(converted, SavedCheckpoint)
    original = load(source, quantization=quantization, progress=False)
    again = load(tmp_path / "out", progress=False)
    assert_equal(again.params, original.params)
    assert again.config.quantization_method == quantization
    assert converted.eos_token_ids == open_checkpoint(str(source)).eos_token_ids
    assert converted.tokenizer.encode("a b") == open_checkpoint(str(source)).tokenizer.encode("a b")
    # And what it computes is the golden's.
    if name == "phi3":
        case = json.loads((source / "expected.json").read_text())["cases"][0]
        exact = load(tmp_path / "out", dtype="float32", progress=False)
        ids = np.asarray([case["prompt_ids"]], np.int32)
        logits = dense_logits(exact.graphdef, exact.params, jax.numpy.asarray(ids))
        assert np.abs(np.asarray(logits[0]) - case["logits"]).mean() < 0.05, "rounded to bfloat16"


def test_converted_gguf_has_its_tokenizer_template_and_defaults(
    demo_model_path: Path, tmp_path: Path
) -> None:
    original = open_checkpoint(str(demo_model_path))
    convert_checkpoint(original, tmp_path / "out", progress=False)
    converted = open_checkpoint(str(tmp_path / "out"))
    assert converted.model_config == original.model_config
    assert converted.tokenizer.chat_template == original.tokenizer.chat_template
    assert converted.eos_token_ids == original.eos_token_ids
    text = "<|im_start|>user\nNaïve café 123<|im_end|>"
    assert converted.tokenizer.encode(text) == original.tokenizer.encode(text)
    assert converted.sampling_defaults == original.sampling_defaults
    assert_equal(
        load(tmp_path / "out", progress=False).params, load(demo_model_path, progress=False).params
    )


def test_devices_read_their_slices_and_copies_of_kv_heads(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "golden" / "tiny" / "llama"
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    split, mesh = TensorParallel(config, 4), tensor_parallel_mesh(4)
    source = SafetensorsSource(folder)
    save_params(load_params(config, source, dtype="float32", progress=False), tmp_path / "p")
    shardings = split.param_shardings(mesh, dtype="float32")
    assert split.kv_head_copies == 2
    settings = {"shardings": shardings, "kv_head_copies": 2, "progress": False}
    expected = load_params(config, source, dtype="float32", **settings)
    params = restore_params(
        tmp_path / "p", abstract_model(split.whole, dtype="float32")[1], **settings
    )
    assert_equal(params, expected)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding


def test_restoring_casts_and_shows_progress(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, expected = abstract_model(CONFIG, dtype="bfloat16")
    params = restore_params(saved, expected)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    exact = random_params(CONFIG)["embed"]["weight"][...].astype("bfloat16")
    np.testing.assert_array_equal(params["embed"]["weight"][...], exact)
    assert "Restoring weights: 100%" in capsys.readouterr().err


def test_parameters_that_do_not_fit_are_named(saved: Path, tmp_path: Path) -> None:
    params = random_params(CONFIG)
    del params["norm"]
    params["layers"][0]["mlp"]["up_proj"]["weight"] = nnx.Param(jax.numpy.zeros((2, 3)))
    params["layers"][1]["mlp"]["up_proj"]["weight"] = nnx.Param(jax.numpy.zeros((48, 32), "int8"))
    params["extra"] = {"weight": nnx.Param(jax.numpy.zeros(3))}
    save_params(params, tmp_path / "p")
    _, expected = abstract_model(CONFIG, dtype="float32")
    with pytest.raises(CheckpointError, match="do not fit the config") as error:
        restore_params(tmp_path / "p", expected, progress=False)
    assert "missing: norm.weight" in str(error.value)
    assert "unexpected: extra.weight" in str(error.value)
    assert "layers.0.mlp.up_proj.weight [2, 3] float32 instead of [48, 32] float32" in str(
        error.value
    )
    assert "layers.1.mlp.up_proj.weight [48, 32] int8 instead of [48, 32] float32" in str(
        error.value
    )
    with pytest.raises(CheckpointError, match=r"could not be written to .*name a folder"):
        save_params(params, tmp_path / "p")


RESTORE_SCRIPT = """
import sys
from paged.models.errors import CheckpointError
from paged.models.forward import abstract_model
from paged.models.saved_params import restore_params
from tests.models.test_decoder import CONFIG

_, expected = abstract_model(CONFIG, dtype="float32")
for folder in sys.argv[1:]:
    try:
        restore_params(folder, expected, progress=False)
    except CheckpointError as error:
        print(error)
"""


def test_damaged_files_are_an_error(saved: Path, tmp_path: Path) -> None:
    for damage in ("cut", "emptied", "without metadata"):
        folder = tmp_path / damage
        shutil.copytree(saved, folder)
        if damage == "without metadata":
            (folder / "_METADATA").unlink()
            continue
        for file in folder.rglob("d/*"):
            with file.open("r+b") as content:
                content.truncate(file.stat().st_size // 2 if damage == "cut" else 0)
    # In a process of its own: of many reads one fails, and the others say so whenever they end.
    done = subprocess.run(
        [sys.executable, "-c", RESTORE_SCRIPT, *sorted(map(str, tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    found = re.findall(r"damaged parameters .*; run `paged convert` again", done.stdout)
    assert len(found) == 3, done.stdout


def test_folders_that_cannot_be_used_are_refused(data_dir: Path, tmp_path: Path) -> None:
    source = open_checkpoint(str(tiny_directory(data_dir, "llama", tmp_path / "hf")))
    with pytest.raises(ValueError, match="exists and is no empty folder"):
        convert_checkpoint(source, tmp_path / "hf", progress=False)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert_checkpoint(source, tmp_path / "file" / "out", progress=False)
    out = tmp_path / "out"
    convert_checkpoint(source, out, quantization="int8", progress=False)
    with pytest.raises(CheckpointError, match="holds saved parameters; use load_params"):
        open_checkpoint(str(out)).open_source()
    with pytest.raises(ValueError, match="quantised by 'int8' already"):
        load(out, quantization="int4", progress=False)
    (out / "paged.json").write_text('{"format": 7}')
    with pytest.raises(CheckpointError, match=r"format=7 .* run `paged convert` again"):
        open_checkpoint(str(out))
    (out / "paged.json").unlink()
    with pytest.raises(CheckpointError, match=r"`paged convert` did not finish; run it again"):
        open_checkpoint(str(out))
