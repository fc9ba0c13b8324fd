"""Output tokens per second of a batch of equal requests, in process.

python benchmarks/throughput.py --num-prompts 16 --input-len 128 --output-len 128
"""

import argparse
import json
import random
import time

from paged import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or Hub id (default: the demo model)")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128, help="tokens")
    parser.add_argument("--output-len", type=int, default=128, help="tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--linear-backend", default="auto", help="auto, native or xla")
    parser.add_argument("--quantization", help="int8 (default: the weights as they are)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs after one warm-up")
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()

    length = args.input_len + args.output_len
    settings = {
        "max_model_len": max(length, 256),
        "async_scheduling": args.async_scheduling,
        "linear_backend": args.linear_backend,
        "quantization": args.quantization,
    }
    with LLM(args.model, dtype=args.dtype, **settings) as llm:
        vocab_size = llm.get_tokenizer().vocab_size
        rng = random.Random(0)
        params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
        rates = []
        for _ in range(args.runs + 1):
            # New prompts each time, so that the prefix cache has nothing to give.
            prompts = [
                [rng.randrange(100, vocab_size) for _ in range(args.input_len)]
                for _ in range(args.num_prompts)
            ]
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            rates.append(num_tokens / seconds)
            print(f"{num_tokens} tokens in {seconds:.2f} s: {rates[-1]:.1f} output tokens/s")
    timed = sorted(rates[1:])
    median = timed[len(timed) // 2]
    print(f"median {median:.1f} output tokens/s (min {timed[0]:.1f}, max {timed[-1]:.1f})")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"output_tokens_per_second": median, "runs": timed}, file)


if __name__ == "__main__":
    main()
