"""Writes a GGUF file as a Hugging Face directory in bfloat16; runs where transformers is.

python -m benchmarks.peers.convert FILE.gguf DIRECTORY
"""

import sys
from pathlib import Path


def convert(gguf: Path, directory: Path) -> None:
    """Write weights, configuration and tokenizer; the directory appears when it is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scratch = directory.with_name(directory.name + ".part")
    files = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**files, dtype="float32").bfloat16()
    # The weights are plain by now, but would be saved as what they were read from.
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(scratch)
    AutoTokenizer.from_pretrained(**files).save_pretrained(scratch)
    scratch.rename(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
