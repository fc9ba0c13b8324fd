"""What structured output costs: decode throughput with and without it, and time per mask.

python benchmarks/structured.py --num-prompts 16 --output-len 128

All runs decode the same number of tokens, in turn: unconstrained, and within a JSON schema whose
array goes on for as long as there are tokens. Jump-ahead is off in the comparison (log
probabilities turn it off, and both ask for them), so that steps are alike; its gain is a figure of
its own.
"""

import argparse
import json
import random
import time

import numpy as np

from paged import LLM, SamplingParams, StructuredOutputs
from paged.models.sampling import mask_words
from paged.scheduler.structured.compiler import GrammarCompiler
from paged.scheduler.structured.config import StructuredOutputsConfig

ROW = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99999},
        "description": {"type": "string", "minLength": 20, "maxLength": 60},
        "category": {"enum": ["vegetable", "mineral", "animal"]},
        "available": {"type": "boolean"},
    },
    "required": ["identifier", "description", "category", "available"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ROW, "minItems": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or Hub id (default: the demo model)")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=32, help="tokens")
    parser.add_argument("--output-len", type=int, default=128, help="tokens")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each kind after one")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    with LLM(args.model, max_model_len=max(256, args.input_len + args.output_len)) as llm:
        figures = measure_throughput(llm, args)
        figures |= measure_masks(llm, args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file)


def measure_throughput(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    wanted = StructuredOutputs(json=SCHEMA)
    kinds = {
        "sampled alike": {"logprobs": 0},
        "structured": {"logprobs": 0, "structured_outputs": wanted},
        "structured, jumping": {"structured_outputs": wanted},
        "unconstrained": {},
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    rng = random.Random(0)
    vocab_size = llm.get_tokenizer().vocab_size
    for _ in range(args.runs + 1):
        for kind, fields in kinds.items():
            prompts = [
                [rng.randrange(100, vocab_size) for _ in range(args.input_len)]
                for _ in range(args.num_prompts)
            ]
            params = SamplingParams(
                temperature=args.temperature, max_tokens=args.output_len, ignore_eos=True, **fields
            )
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert num_tokens == args.num_prompts * args.output_len
            rates[kind].append(num_tokens / seconds)
    medians = {kind: float(np.median(values[1:])) for kind, values in rates.items()}
    for kind, median in medians.items():
        print(f"{kind}: median {median:.1f} output tokens/s")
    cost = 1 - medians["structured"] / medians["sampled alike"]
    gain = medians["structured, jumping"] / medians["unconstrained"] - 1
    print(f"structured output costs {cost:.1%} of decode throughput at {args.num_prompts} requests")
    print(f"with jump-ahead it is {gain:+.1%} against unconstrained requests")
    return {**medians, "cost": cost, "jumping_gain": gain}


def measure_masks(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    """Walk one sample through a text of the schema and time each mask."""
    tokenizer = llm.get_tokenizer()
    vocab_size = tokenizer.vocab_size
    compiler = GrammarCompiler.of_model(
        tokenizer, vocab_size=vocab_size, eos_token_ids=[], config=StructuredOutputsConfig()
    )
    compiler.wait_until_loaded()
    started = time.perf_counter()
    grammar = compiler.compile(StructuredOutputs(json=SCHEMA))
    compile_ms = 1e3 * (time.perf_counter() - started)
    constraint = grammar.start(jumps=False)
    mask = np.full(mask_words(vocab_size), -1, np.int32)
    rng = np.random.default_rng(0)
    times = []
    for _ in range(args.output_len * 4):
        started = time.perf_counter()
        constraint.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        times.append(1e3 * (time.perf_counter() - started))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert constraint.accept(int(rng.choice(allowed)))
    compiler.close()
    median, p99, most = np.median(times), np.percentile(times, 99), max(times)
    print(f"grammar compiled in {compile_ms:.1f} ms")
    print(
        f"mask of {vocab_size} tokens per request and step: median {median:.3f} ms, "
        f"99% {p99:.3f} ms, most {most:.3f} ms"
    )
    return {"compile_ms": compile_ms, "mask_ms": float(median), "mask_p99_ms": float(p99)}


if __name__ == "__main__":
    main()
