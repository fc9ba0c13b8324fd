"""torch's scaled-dot-product attention on the shapes that ours is timed on; prints JSON.

Keys and values are contiguous and of one length: what ours reads through block tables. Run by
`benchmarks.gpu.run` in a process of its own, so that neither library waits for the other's memory.
"""

import importlib
import json
import statistics
import time

# Name, sequences, query rows, context.
SHAPES = (
    ("prefill 8k", 1, 8192, 8192),
    ("decode 64 x 8k", 64, 1, 8192),
    ("decode 1 x 32k", 1, 1, 32768),
)
_Q_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128


def main() -> None:
    """Print the microseconds of each shape by name: median, lowest, highest."""
    torch = importlib.import_module("torch")
    results = {}
    for name, num_seqs, rows, context in SHAPES:

        def random(heads: int, length: int, num_seqs: int = num_seqs):
            shape = (num_seqs, heads, length, _HEAD_DIM)
            return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

        q, k, v = random(_Q_HEADS, rows), random(_KV_HEADS, context), random(_KV_HEADS, context)
        attend = torch.nn.functional.scaled_dot_product_attention
        samples = []
        for sample in range(6):
            started = time.perf_counter()
            for _ in range(5):
                attend(q, k, v, is_causal=rows > 1, enable_gqa=True)
            torch.cuda.synchronize()
            if sample:  # the first one warms up
                samples.append((time.perf_counter() - started) / 5 * 1e6)
        results[name] = [statistics.median(samples), min(samples), max(samples)]
        del q, k, v
    print(json.dumps(results))


if __name__ == "__main__":
    main()
