"""Serves a `FakeEngine` as `paged serve`.

python -m tests.server.serve_fake TIMEOUT ANSWER [PORT [STEP_SECONDS]]
"""

import asyncio
import sys

from paged.server.cli_serve import reserve_port, serve_until_stopped
from paged.server.cli_settings import set_up_logging
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine


async def start() -> FakeEngine:
    step_seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 0.01
    return FakeEngine(answer=sys.argv[2], max_model_len=100_000, step_seconds=step_seconds)


if __name__ == "__main__":
    set_up_logging("info")
    with reserve_port("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 0) as listener:
        asyncio.run(
            serve_until_stopped(
                start, ServerSettings(), listener, shutdown_timeout=float(sys.argv[1])
            )
        )
