"""Processor microseconds per streamed token of engine and server together, without a device.

    python -m benchmarks.http_streaming

Clients in another process read server-sent events of as many requests as run. The engine is that of
`benchmarks/host_loop.py`; its own share is what that benchmark reports for the same load, so the
difference is what HTTP adds. A step pretends to take longer than the event loop needs for it: a
server that falls behind sends the tokens of several steps as one event, which is cheaper.
"""

import argparse
import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from aiohttp import web
from tqdm import tqdm

from benchmarks.host_loop import VOCAB_SIZE, Load, median_gap
from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import LoadedEngine
from paged.scheduler.output import StepStats
from paged.server.app import make_app, make_runner
from paged.server.cli_serve import spare_collector
from paged.server.settings import ServerSettings

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
READERS = str(Path(__file__).with_name("stream_readers.py"))
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def request_bytes(kind: str, num_outputs: int) -> bytes:
    """Return one streaming POST."""
    body = {"stream": True, "temperature": 0, "max_tokens": num_outputs, "ignore_eos": True}
    prompt = "a" * 100
    body |= (
        {"prompt": prompt}
        if kind == "completions"
        else {"messages": [{"role": "user", "content": prompt}]}
    )
    data = json.dumps(body).encode()
    head = (
        f"POST {PATHS[kind]} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def step_seconds(num_seqs: int, num_steps: int, kind: str, pause: float) -> float:
    """Return the median processor seconds of a step of the whole server."""
    load = Load(num_seqs, num_steps, stream=True)
    load.runner.step_seconds = pause
    model = SimpleNamespace(vocab_size=VOCAB_SIZE)
    checkpoint = SimpleNamespace(
        name="none", sampling_defaults={}, model_config=model, chat_template=None
    )
    engine = AsyncEngine(
        LoadedEngine(load.engine, checkpoint, EngineConfig(), load.max_model_len, {})
    )
    moments: list[float] = []

    def on_step(stats: StepStats) -> None:
        if stats.num_running == num_seqs:
            moments.append(time.process_time())

    engine.start()
    runner = make_runner(make_app(engine, ServerSettings(chat_template=CHAT_TEMPLATE)))
    await runner.setup()
    engine.add_stats_listener(on_step)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        await web.SockSite(runner, listener, backlog=2048).start()
        port = listener.getsockname()[1]
        clients = await asyncio.create_subprocess_exec(
            sys.executable, READERS, str(port), str(num_seqs), stdin=asyncio.subprocess.PIPE
        )
        await clients.communicate(request_bytes(kind, load.num_outputs))
        await runner.cleanup()
    await engine.shutdown()
    return median_gap(moments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--json", help="write the figures to this file, in microseconds")
    args = parser.parse_args()
    spare_collector()
    rows: dict[str, dict[str, float]] = {}
    for num_seqs in tqdm(args.num_seqs, desc="Loads"):
        row = rows[str(num_seqs)] = {}
        for kind in PATHS:
            pause = 0.002 + 60e-6 * num_seqs
            seconds = asyncio.run(step_seconds(num_seqs, args.num_steps, kind, pause))
            row[kind] = 1e6 * seconds / num_seqs
    print(f"{'requests':<12}" + "".join(f"{kind:>14}" for kind in PATHS))
    for name, row in rows.items():
        print(f"{name:<12}" + "".join(f"{row[kind]:>14.1f}" for kind in PATHS))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
