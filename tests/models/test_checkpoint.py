"""Opening a checkpoint: what a user may write, and what is found there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paged.models.chat_template import ChatTemplateError
from paged.models.checkpoint import open_checkpoint
from paged.models.errors import CheckpointError
from tests.gguf_to_hf import write_hf_directory
from tests.models.gguf_writing import convert_to_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gguf_path(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.gguf"
    tiny = data_dir / "golden/tiny"
    return convert_to_gguf(tiny / "llama3_rope", tiny / "tokenizer", path)


@pytest.fixture
def directory(gguf_path: Path, tmp_path: Path) -> Path:
    return write_hf_directory(gguf_path, tmp_path / "hf")


def test_a_gguf_file_and_a_directory_present_the_same_model(gguf_path: Path, directory: Path):
    from_file, from_directory = open_checkpoint(str(gguf_path)), open_checkpoint(str(directory))
    assert from_file.model_config == from_directory.model_config
    text = "<bos>Grüße, 世界!<eos>"
    assert from_file.tokenizer.encode(text) == from_directory.tokenizer.encode(text)
    assert from_file.eos_token_ids == from_directory.eos_token_ids == {2}
    assert from_file.generation_config["eos_token_id"] == [2]
    message = {"role": "user", "content": "hi"}
    assert from_file.chat_template is not None
    assert from_directory.chat_template is not None
    rendered = from_file.chat_template.render([message])
    assert rendered == from_directory.chat_template.render([message]) == "[user]hi\n[assistant]"
    a, b = from_file.open_source(), from_directory.open_source()
    assert sorted(a.names()) == sorted(b.names())
    for name in a.names():
        assert np.array_equal(a.read(name).astype(np.float32), b.read(name).astype(np.float32))


def test_properties_are_read_once(gguf_path: Path, directory: Path):
    for path in (gguf_path, directory):
        checkpoint = open_checkpoint(str(path))
        assert checkpoint.tokenizer is checkpoint.tokenizer
        assert checkpoint.chat_template is checkpoint.chat_template
        assert checkpoint.model_config is checkpoint.model_config


def test_the_name_is_what_was_given(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(directory.parent)
    checkpoint = open_checkpoint("./hf/")
    assert checkpoint.name == "./hf/"
    assert checkpoint.path.samefile(directory)
    monkeypatch.setenv("HOME", str(directory.parent))
    assert open_checkpoint("~/hf").name == "~/hf"


def test_no_name_is_the_demo_model(demo_model_path: Path):
    checkpoint = open_checkpoint(None, cache_dir=demo_model_path.parent)
    assert checkpoint.name == "smollm2-135m-instruct"
    assert checkpoint.path == demo_model_path
    assert checkpoint.model_config.num_layers == 30


def test_sampling_defaults_have_the_names_of_sampling_parameters(directory: Path):
    values = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "min_p": None, "other": 1}
    (directory / "generation_config.json").write_text(json.dumps(values))
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.sampling_defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}


def test_a_directory_without_a_generation_config_has_no_defaults(directory: Path):
    (directory / "generation_config.json").unlink()
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.generation_config == {}
    assert checkpoint.sampling_defaults == {}
    assert checkpoint.eos_token_ids == {2}  # of config.json


def test_a_model_without_a_chat_template_has_none(directory: Path):
    (directory / "tokenizer_config.json").unlink()
    assert open_checkpoint(str(directory)).chat_template is None


def test_a_broken_chat_template_stops_only_chats(directory: Path):
    (directory / "chat_template.jinja").write_text("{% if %}")
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.tokenizer.encode("x") == [120]
    with pytest.raises(ChatTemplateError, match="error in line 1"):
        assert checkpoint.chat_template


# --- what does not exist -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["nowhere", "/no/such/folder", "./a/b", "a/b/c", "x.gguf", "org/x.gguf", "~nobody/x"]
)
def test_what_is_neither_a_path_nor_an_id_is_refused(name: str):
    with pytest.raises(CheckpointError, match=r"does not exist; pass a local directory, a GGUF"):
        open_checkpoint(name)


def test_a_file_of_another_kind_is_refused(directory: Path):
    with pytest.raises(CheckpointError, match=r"is no directory and no \.gguf file"):
        open_checkpoint(str(directory / "config.json"))


def test_a_directory_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no config\.json; pass a local directory"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "a-q4.gguf").touch()
    with pytest.raises(CheckpointError, match=r"pass one of its GGUF files \(a-q4\.gguf\)"):
        open_checkpoint(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused_when_read(tmp_path: Path):
    (tmp_path / "x.gguf").write_text("hello")
    checkpoint = open_checkpoint(str(tmp_path / "x.gguf"))
    with pytest.raises(CheckpointError, match=r"cannot be read as GGUF .*magic invalid"):
        assert checkpoint.model_config


# --- the Hub -----------------------------------------------------------------------------------

HUB_PROBE = """
import sys
from paged.models.checkpoint import open_checkpoint
from paged.models.errors import CheckpointError
for name in sys.argv[1:]:
    try:
        checkpoint = open_checkpoint(name)
        print(checkpoint.name, checkpoint.path, checkpoint.model_config.num_layers)
    except CheckpointError as error:
        print(error)
"""


def open_offline(home: Path, *models: str) -> list[str]:
    """The line that a process which cannot reach the Hub prints about each model.

    A process of its own: `huggingface_hub` reads its settings when it is imported.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", HUB_PROBE, *models]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=ROOT)
    return done.stdout.splitlines()


def cache_on_disk(home: Path, model: str) -> Path:
    """Lay out an empty snapshot of a model as `huggingface_hub` caches it; return its folder."""
    commit = "0123456789" * 4
    folder = home / "hub" / f"models--{model.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot


def test_without_the_hub_a_cached_model_is_used_and_another_is_one_line(
    tmp_path: Path, gguf_path: Path
):
    snapshot = cache_on_disk(tmp_path, "org/name")
    write_hf_directory(gguf_path, snapshot)
    (snapshot / "x.gguf").write_bytes(gguf_path.read_bytes())
    names = ["org/name", "org/name:x.gguf", "org/name:y.gguf", "org/other", "org/other:x.gguf"]
    whole, one_file, no_file, *unknown = open_offline(tmp_path, *names)
    assert whole == f"org/name {snapshot} 2"
    assert one_file == f"org/name:x.gguf {snapshot / 'x.gguf'} 2"
    assert no_file.startswith("org/name has no file y.gguf; pass a local directory")
    for line in unknown:
        assert line.startswith("org/other is no local path and could not be fetched from the Hugg")
        assert "Connection refused" in line
        assert "check the name, the network and, for a gated model, HF_TOKEN" in line


def test_pooling_is_what_sentence_transformers_keep(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(str(tmp_path)).pooling_modes == frozenset()
    modes = {
        "word_embedding_dimension": 8,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_lasttoken": True,
        "include_prompt": True,
    }
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    assert open_checkpoint(str(tmp_path)).pooling_modes == {"mean", "lasttoken"}
