"""Time to first token of documents that do not fit into the KV cache, second time over.

Serves some documents one after the other, then all of them again: without tiers, where each is
computed anew, from host memory, and from disk. One run, one machine; the ratios are the result.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time

from tqdm import tqdm

from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.loading import load_engine
from paged.scheduler.params import SamplingParams

_GIB = 2**30


def first_token_seconds(engine: Engine, name: str, token_ids: list[int]) -> float:
    """Serve one prompt alone and return its time to first token."""
    started = time.perf_counter()
    engine.add_request(name, token_ids, SamplingParams(temperature=0, max_tokens=1))
    while not engine.step()[0]:
        pass
    seconds = time.perf_counter() - started
    while engine.has_unfinished:
        engine.step()
    return seconds


def measure(args: argparse.Namespace, name: str, config: EngineConfig) -> dict[str, float]:
    """Load an engine, serve both passes and print what came of it."""
    loaded = load_engine(args.model, config, progress=False)
    engine = loaded.engine
    documents = [
        [(17 * number + 7 * position) % 40_000 + 100 for position in range(args.document_tokens)]
        for number in range(args.documents)
    ]
    passes: list[list[float]] = []
    restored: dict[str, int] = {}
    first_token_seconds(engine, "warm-up", list(range(100, 400)))
    engine.take_stats()
    with tqdm(total=2 * len(documents), desc=name, unit="document") as bar:
        for number in range(2):
            passes.append([])
            for i, document in enumerate(documents):
                passes[-1].append(first_token_seconds(engine, f"{number}-{i}", document))
                bar.update()
    restored = (
        {medium: tier.num_hits for medium, tier in engine._tiers.stats().media.items()}
        if engine._tiers is not None
        else {}
    )
    engine.close()
    first, second = (statistics.median(seconds) for seconds in passes)
    print(
        f"{name:8}  first pass {first * 1e3:8.1f} ms  second pass {second * 1e3:8.1f} ms  "
        f"blocks restored: {restored}"
    )
    return {"first": first, "second": second}


def main() -> None:
    """Run the three cases and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--document-tokens", type=int, default=2000)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    blocks_per_document = -(-args.document_tokens // 16) + 1
    base = EngineConfig(
        dtype=args.dtype,
        max_model_len=args.document_tokens + 16,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        # One document and a bit: nothing of it is left when it comes again.
        num_gpu_blocks_override=blocks_per_document * 3 // 2,
    )
    seconds = {"none": measure(args, "none", base)}
    host = dataclasses.replace(base, kv_offloading_size=4.0)
    seconds["host"] = measure(args, "host", host)
    with tempfile.TemporaryDirectory() as folder:
        disk = dataclasses.replace(base, kv_offloading_size=0.01, kv_offloading_path=folder)
        seconds["disk"] = measure(args, "disk", disk)
    for name in ("host", "disk"):
        ratio = seconds["none"]["second"] / seconds[name]["second"]
        print(f"second pass from {name}: {ratio:.1f} times faster than computing it again")


if __name__ == "__main__":
    main()
