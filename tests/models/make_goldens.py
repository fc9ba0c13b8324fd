"""Makes tiny goldens with transformers, in an environment of its own:

    python -m venv golden && golden/bin/pip install transformers==5.19 torch numpy
    golden/bin/python tests/models/make_goldens.py granite gemma3_vision

A folder `tests/data/golden/tiny/NAME` gets config.json (the current spelling), config_classic.json
(that of most published checkpoints), model.safetensors (bfloat16) and expected.json: prompts, the
logits of all their positions and 16 greedy tokens, in float32 with eager attention. `noise` is the
largest difference between one pass over a prompt and decoding it, from its tenth token on, token by
token with a cache.
"""

import importlib
import json
import pathlib
import sys
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "golden" / "tiny"
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NUM_PROMPT_TOKENS = (12, 40)
NUM_GREEDY = 16
NUM_FIRST = 9  # tokens of the first pass with a cache
# Standard deviations of the weights: wide enough that every feature moves the logits.
SCALES = {"embed_tokens": 0.3, "lm_head": 0.3, "norm": 0.3}
PROJECTION_SCALE = 0.2
FLOAT32 = "e_score_correction_bias"  # a buffer, which checkpoints have in float32


def granite() -> tuple[str, dict[str, Any], dict[str, Any]]:
    numbers = {
        **COMMON,
        "embedding_multiplier": 1.7,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.11,
        "logits_scaling": 2.3,
        "tie_word_embeddings": True,
    }
    return "Granite", numbers, {"rope_theta": 10000.0, "rope_type": "default"}


def phi3_longrope() -> tuple[str, dict[str, Any], dict[str, Any]]:
    # Prompts are longer than the original context, so that the reference, which looks at their
    # lengths, takes long_factor as an engine does, which looks at the longest context.
    numbers = {**COMMON, "original_max_position_embeddings": 8}
    rope = {
        "rope_theta": 10000.0,
        "rope_type": "longrope",
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 6,
        "long_factor": [1.0, 1.2, 1.9, 3.1, 5.3, 8.0],
    }
    return "Phi3", numbers, rope


DEEPSEEK = {
    **COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}


def deepseek_v2() -> tuple[str, dict[str, Any], dict[str, Any]]:
    numbers = {
        **DEEPSEEK,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.6,
    }
    return "DeepseekV2", numbers, {"rope_theta": 10000.0, "rope_type": "default"}


def deepseek_v2_lite() -> tuple[str, dict[str, Any], dict[str, Any]]:
    numbers = {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2}
    return "DeepseekV2", numbers, {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5}


def deepseek_v3() -> tuple[str, dict[str, Any], dict[str, Any]]:
    numbers = {
        **DEEPSEEK,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    }
    return "DeepseekV3", numbers, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}


def deepseek_v3_plain() -> tuple[str, dict[str, Any], dict[str, Any]]:
    # As Moonlight: no latent queries, no groups; and what no published checkpoint has.
    numbers = {
        **DEEPSEEK,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": False,
        "attention_bias": True,
        "rope_interleave": False,
    }
    return "DeepseekV3", numbers, {"rope_theta": 50000.0, "rope_type": "default"}


RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        granite,
        phi3_longrope,
        deepseek_v2,
        deepseek_v2_lite,
        deepseek_v3,
        deepseek_v3_plain,
    )
}

# Of an encoder of images there must be something to leave out.
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
CLIP_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SECTIONS = {"rope_theta": 1000000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
GEMMA3_ROPES = {
    "full_attention": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
# Name -> family, numbers of the language model, of the encoder, and how the tensors are called
# in published checkpoints: prefixes as transformers has them, and instead of them.
NESTED = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
OUTSIDE = (("model.vision_tower.", "vision_tower."), ("model.multi", "multi"))
VISION_RECIPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "gemma3_vision": (
        "Gemma3",
        COMMON
        | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": GEMMA3_ROPES},
        CLIP_VISION,
        (*NESTED, *OUTSIDE),
    ),
    "mistral3_vision": (
        "Mistral3",
        COMMON
        | {"model_type": "mistral", "head_dim": 32, "sliding_window": None}
        | {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}},
        CLIP_VISION | {"model_type": "pixtral", "head_dim": 8},
        (*NESTED, *OUTSIDE),
    ),
    "qwen2_vl": (
        "Qwen2VL",
        COMMON | {"rope_parameters": SECTIONS, "tie_word_embeddings": True},
        {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2},
        (("model.language_model.", "model."), ("model.visual.", "visual.")),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        COMMON | {"rope_parameters": SECTIONS},
        QWEN_VISION | {"out_hidden_size": 64},
        (("model.language_model.", "model."), ("model.visual.", "visual.")),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        COMMON
        | {"head_dim": 32, "tie_word_embeddings": False}
        | {"rope_parameters": SECTIONS | {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}},
        QWEN_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        (),
    ),
}
MAX_VISION_VALUES = 512


def make(name: str) -> None:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    if name in VISION_RECIPES:
        make_vision(torch, transformers, name)
        return
    family, numbers, rope = RECIPES[name]()
    config = getattr(transformers, f"{family}Config")(
        **numbers, rope_parameters=dict(rope), attn_implementation="eager"
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    draw(torch, model)
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    write_configs(folder, config.to_dict(), f"{family}ForCausalLM", rope)
    tensors = {
        path: value if path.endswith(FLOAT32) else value.bfloat16().contiguous()
        for path, value in by_expert(model.state_dict()).items()
    }
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    write_golden(torch, transformers, model, tensors, folder)


def make_vision(torch: Any, transformers: Any, name: str) -> None:
    """Make the golden of a multimodal model that is given text."""
    family, text, vision, prefixes = VISION_RECIPES[name]
    # No prompt has an image: its tokens are none of the vocabulary.
    ids = {f"{kind}_token_id": 300 for kind in ("image", "video", "vision_start", "vision_end")}
    ids |= {"image_token_index": 300, "boi_token_index": 301, "eoi_token_index": 302}
    is_tied = bool(text.get("tie_word_embeddings", family == "Gemma3"))
    config = getattr(transformers, f"{family}Config")(
        text_config=dict(text), vision_config=dict(vision), tie_word_embeddings=is_tied, **ids
    )
    cls = getattr(transformers, f"{family}ForConditionalGeneration")
    model = cls._from_config(config, attn_implementation="eager").eval()
    draw(torch, model)
    tensors = {}
    for path, value in model.state_dict().items():
        if "language_model" not in path and path != "lm_head.weight":
            if value.numel() > MAX_VISION_VALUES:
                continue
        elif path == "lm_head.weight" and is_tied:
            continue
        prefix, instead = next((row for row in prefixes if path.startswith(row[0])), ("", ""))
        tensors[instead + path.removeprefix(prefix)] = value.bfloat16().contiguous()
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    write_vision_configs(folder, config.to_dict(), f"{family}ForConditionalGeneration")
    write_golden(torch, transformers, model, tensors, folder)


def draw(torch: Any, model: Any) -> None:
    """Draw the weights of a model."""
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            kind = next((kind for kind in SCALES if kind in path), None)
            drawn = torch.randn(parameter.shape) * SCALES.get(kind, PROJECTION_SCALE)
            parameter.copy_((1 + drawn if kind == "norm" else drawn).bfloat16().float())
        for path, buffer in model.named_buffers():
            if path.endswith(FLOAT32):
                buffer.copy_(torch.randn(buffer.shape) * PROJECTION_SCALE)


def write_golden(
    torch: Any, transformers: Any, model: Any, tensors: dict[str, Any], folder: pathlib.Path
) -> None:
    """Write tensors, and what the model makes of the prompts."""
    save = importlib.import_module("safetensors.torch").save_file
    save(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    cases = [make_case(torch, model, length) for length in NUM_PROMPT_TOKENS]
    expected = {
        "note": f"{type(model).__name__} of transformers {transformers.__version__}, "
        "float32, eager",
        "noise": max(case.pop("noise") for case in cases),
        "cases": cases,
    }
    (folder / "expected.json").write_text(json.dumps(expected))


def by_expert(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors named as in published checkpoints, which have those of each expert apart."""
    apart = {}
    for path, value in tensors.items():
        before, is_stack, layer = path.partition(".experts.")
        if not is_stack:
            apart[path] = value
            continue
        parts = {layer: value}
        if layer == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), value.chunk(2, dim=1), strict=True))
        for part, stack in parts.items():
            for expert, weight in enumerate(stack):
                apart[f"{before}.experts.{expert}.{part}.weight"] = weight
    return apart


def write_configs(
    folder: pathlib.Path, config: dict[str, Any], architecture: str, rope: dict[str, Any]
) -> None:
    """Write both spellings of a config."""
    config = {**without_noise(config), "architectures": [architecture]}
    classic = classic_rope(config, rope) | {"torch_dtype": "bfloat16"}
    write_both(folder, config, classic)


def write_vision_configs(folder: pathlib.Path, config: dict[str, Any], architecture: str) -> None:
    """Write both spellings of a multimodal config: of Qwen's, the classic one is flat."""
    config = {**without_noise(config), "architectures": [architecture]}
    for key in ("text_config", "vision_config"):
        config[key] = without_noise(config[key])
    text = dict(config["text_config"])
    rope = text["rope_parameters"]
    if "full_attention" in rope:
        text = classic_rope(text, rope["full_attention"])
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    elif "mrope_section" in rope:
        text = classic_rope(text, rope)
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    else:
        text = classic_rope(text, rope)
    if architecture.startswith("Qwen2"):
        del text["model_type"], config["text_config"]["architectures"]
        classic = {k: v for k, v in config.items() if k != "text_config"}
        classic = {**text, **classic, "tie_word_embeddings": config["tie_word_embeddings"]}
    else:
        classic = {**config, "text_config": text}
    write_both(folder, config, classic | {"torch_dtype": "bfloat16"})


def without_noise(config: dict[str, Any]) -> dict[str, Any]:
    dropped = ("transformers_version", "chunk_size_feed_forward", "id2label", "label2id", "dtype")
    dropped += ("is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type")
    dropped += ("_name_or_path", "return_dict")
    return {key: value for key, value in config.items() if key not in dropped}


def classic_rope(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    classic = {key: value for key, value in config.items() if key != "rope_parameters"}
    outside = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in rope.items() if key not in outside}
    if scaling["rope_type"] == "default":
        scaling = {}
    classic |= {key: rope[key] for key in outside if key in rope}
    return classic | {"rope_scaling": scaling or None}


def write_both(folder: pathlib.Path, config: dict[str, Any], classic: dict[str, Any]) -> None:
    for name, values in (
        ("config.json", {**config, "dtype": "bfloat16"}),
        ("config_classic.json", classic),
    ):
        (folder / name).write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


def make_case(torch: Any, model: Any, length: int) -> dict[str, Any]:
    """Return one case: a random prompt, its logits, and what follows greedily."""
    prompt = np.random.default_rng(length).integers(3, 256, length).tolist()
    ids, greedy, gaps = list(prompt), [], []
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
        past, stepwise = None, []
        for part in (prompt[:NUM_FIRST], *([token] for token in prompt[NUM_FIRST:])):
            out = model(torch.tensor([part]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            stepwise += out.logits[0]
        for _ in range(NUM_GREEDY):
            # Without a cache, so that the whole context is what the reference looks at.
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
            greedy.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            ids.append(greedy[-1])
    near = [step for step, gap in enumerate(gaps) if gap < 1e-3]
    return {
        "prompt_ids": prompt,
        "logits": [[round(float(value), 6) for value in row] for row in logits],
        "greedy_ids": greedy,
        "greedy_gaps": gaps,
        "first_near_tie_step": near[0] if near else None,
        "noise": float((torch.stack(stepwise) - logits).abs().max()),
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or (*RECIPES, *VISION_RECIPES):
        make(name)
        print(name)
