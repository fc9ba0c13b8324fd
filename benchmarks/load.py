"""Seconds and memory that it takes to load a model, from each format, against transformers.

    python benchmarks/load.py                                  # Qwen2.5-Coder-0.5B
    python benchmarks/load.py --transformers PYTHON            # with an interpreter that has it

One model as GGUF, as a Hugging Face directory made of it, and as `paged convert` writes it, each
loaded by a process of its own; files are in the page cache. Memory is the largest growth of what
the process has for itself (anonymous pages; those of files can be dropped at any time), as a
multiple of the parameters' bytes.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]

_WATCH = """
import json, sys, threading, time

def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [1024 * int(fields[name].split()[0]) for name in ("RssAnon", "VmRSS")]

def watched(load):
    before, peak, done = resident(), [0, 0], threading.Event()
    def look():
        while not done.wait(0.002):
            peak[:] = map(max, peak, resident())
    thread = threading.Thread(target=look)
    thread.start()
    started = time.perf_counter()
    num_bytes = load()
    seconds = time.perf_counter() - started
    done.set()
    thread.join()
    anonymous, with_files = ((p - b) / num_bytes for p, b in zip(peak, before))
    print(json.dumps([seconds, num_bytes, anonymous, with_files]))
"""

_OURS = """
import os
import jax
from paged.models.library import load
import paged.models.saved_params, orbax.checkpoint, paged.native.linear, gguf
from paged.models.linear_packing import pack_linear_layers
from paged.native.library import load_library
jax.numpy.zeros(1).block_until_ready()
model, packs = sys.argv[1], sys.argv[2] == "packed"
if packs:
    reason = load_library(os.path.expanduser("~/.cache/paged/native"))
    assert reason is None, reason

def run():
    graphdef, params, _ = load(model, dtype="bfloat16", progress=False)
    if packs:
        params = pack_linear_layers(graphdef, params, progress=False)
    jax.block_until_ready(params)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))

watched(run)
"""

_THEIRS = """
import torch, transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.zeros(1)
from transformers import AutoModelForCausalLM

def run():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    if sys.argv[2] == "read":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return sum(p.numel() * p.element_size() for p in model.parameters())

watched(run)
"""


def measure(python: str, code: str, *arguments: str) -> list[float]:
    """Return seconds, bytes, and two multiples of bytes: without and with pages of files."""
    command = [python, "-c", _WATCH + code, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from paged.models.checkpoint import open_checkpoint
    from paged.models.convert import convert_checkpoint
    from tests.gguf_to_hf import write_hf_directory
    from tests.real_models import fetch_real_model

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--transformers", metavar="PYTHON", help="interpreter that has it")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    gguf = fetch_real_model(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        safetensors, ours = pathlib.Path(scratch) / "hf", pathlib.Path(scratch) / "converted"
        write_hf_directory(gguf, safetensors)
        convert_checkpoint(open_checkpoint(str(gguf)), ours, dtype="bfloat16", progress=False)
        runs = {
            f"{name}, {how}": (sys.executable, _OURS, str(path), how)
            for name, path in (("GGUF", gguf), ("safetensors", safetensors), ("converted", ours))
            for how in ("as it is", "packed")
        }
        if args.transformers:
            # It maps the file, and reads nothing before the first step: both are told.
            for how in ("mapped", "read"):
                theirs = (args.transformers, _THEIRS, str(safetensors), how)
                runs[f"transformers, {how}"] = theirs
        results = {name: [] for name in runs}
        for _ in range(args.rounds):  # all in turn, so that what else goes on hits them alike
            for name, run in runs.items():
                results[name].append(measure(*run))
    print(f"{'':28}{'seconds':>9}{'MB':>8}{'memory':>9}{'with files':>12}")
    for name, rounds in results.items():
        seconds, num_bytes, anonymous, files = (min(column) for column in zip(*rounds, strict=True))
        print(f"{name:28}{seconds:9.2f}{num_bytes / 1e6:8.0f}{anonymous:8.2f}x{files:11.2f}x")


if __name__ == "__main__":
    main()
