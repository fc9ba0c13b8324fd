"""Which attention an engine gets: native kernels, XLA with a warning, or an error."""

import dataclasses
import importlib
import logging

import pytest

from paged.native import library
from paged.scheduler.backend_choice import _calls, choose_backends
from paged.scheduler.config import EngineConfig
from tests.models.test_model_size import DEEPSEEK_V2_LITE
from tests.scheduler.test_loading import MODEL

LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def choose(platform: str = "cpu", **settings) -> str:
    settings = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", **LIMITS, **settings}
    config = EngineConfig(linear_backend="xla", **settings)
    return choose_backends(config, MODEL, platform).attention_backend


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float32", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("requested", ["auto", "native"])
def test_cpu_uses_native_kernels(native, requested: str, kv_cache_dtype: str):
    assert choose(attention_backend=requested, kv_cache_dtype=kv_cache_dtype) == "native"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float16"}, "computes in bfloat16 or float32, not in float16"),
        ({"kv_cache_dtype": "float16"}, "reads a cache of .*, not of float16"),
    ],
)
def test_a_type_without_a_kernel_is_xlas_and_one_warning(native, settings, reason, caplog):
    assert choose(**settings) == "xla"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Attention runs on XLA, which is slower" in record.message
    with pytest.raises(ValueError, match=f"'native' does not support this call: it {reason}"):
        choose(attention_backend="native", **settings)


def test_no_compiler_is_xla_and_one_warning_with_the_remedy(no_compiler, caplog, tmp_path):
    assert choose(native_cache_dir=str(tmp_path / "cache")) == "xla"
    (record,) = caplog.records
    assert "install g++" in record.message
    with pytest.raises(ValueError, match=r"'native' is unavailable: there is no C\+\+ compiler"):
        choose(attention_backend="native", native_cache_dir=str(tmp_path / "cache"))


def test_xla_is_taken_at_its_word(no_compiler, caplog):
    assert choose(attention_backend="xla") == "xla"
    assert not caplog.records


def test_accelerators_have_no_native_kernels(caplog):
    assert choose("gpu") == "xla"
    assert not caplog.records
    with pytest.raises(ValueError, match="it runs on cpu, not on gpu"):
        choose("gpu", attention_backend="native")


def test_latent_vectors_have_native_kernels_on_a_cpu_alone(native):
    config = EngineConfig(dtype="bfloat16", kv_cache_dtype="bfloat16", **LIMITS)
    assert choose_backends(config, DEEPSEEK_V2_LITE, "cpu").attention_backend == "native"
    (call,) = _calls(config, DEEPSEEK_V2_LITE)
    for name in ("mosaic", "triton"):
        support = importlib.import_module(f"paged.{name}.support")
        arguments = (90,) if name == "mosaic" else ()
        reason = support.unsupported(call, *arguments)
        assert reason == "it does not read a cache whose keys are its values"


def test_all_layers_are_asked_for(native):
    model = dataclasses.replace(MODEL, layer_windows=(None, 8))
    config = EngineConfig(dtype="float32", kv_cache_dtype="float32", **LIMITS)
    assert choose_backends(config, model, "cpu").attention_backend == "native"
