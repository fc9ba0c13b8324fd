"""Time to first token of a prompt, and of the same prompt again, over HTTP to a running server.

python benchmarks/prefix_ttft.py --url http://127.0.0.1:8000/v1 --prompt-len 1000
"""

import argparse
import json
import random
import statistics
import time
import urllib.request


def first_token(url: str, prompt: list[int]) -> tuple[float, int]:
    """Return seconds to the first streamed token, and the cached tokens of the usage chunk."""
    body = {
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    started = time.perf_counter()
    seconds, cached = 0.0, 0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            seconds = seconds or time.perf_counter() - started
            usage = json.loads(line[6:]).get("usage")
            if usage:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    return seconds, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--prompt-len", type=int, default=1000, help="tokens")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    rng = random.Random(time.time_ns())
    ratios = []
    for _ in range(args.runs):
        prompt = [rng.randrange(100, 40000) for _ in range(args.prompt_len)]
        cold, cold_cached = first_token(args.url, prompt)
        warm, warm_cached = first_token(args.url, prompt)
        ratios.append(cold / warm)
        print(
            f"first {cold * 1e3:.0f} ms ({cold_cached} cached), "
            f"second {warm * 1e3:.0f} ms ({warm_cached} cached): {ratios[-1]:.1f}x"
        )
    print(f"median {statistics.median(ratios):.1f}x")


if __name__ == "__main__":
    main()
