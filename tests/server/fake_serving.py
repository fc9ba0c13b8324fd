"""The real engine thread, around a runner without a model, as the server needs it."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp.test_utils import TestClient, TestServer

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import LoadedEngine
from paged.scheduler.request import Request
from paged.scheduler.startup import Phase
from paged.server.app import make_app
from paged.server.settings import ServerSettings
from tests.scheduler.fakes import make_engine
from tests.server.fake_engine import FakeCheckpoint, _model_config
from tests.server.serving import Client

CONFIG = EngineConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32)


class Checkpoint(FakeCheckpoint):
    name = "tiny"


def with_engine[T](
    test: Callable[[Client], Awaitable[T]],
    script: Callable[[Request], int],
    settings: ServerSettings,
    *,
    phases: tuple[Phase, ...] = (),
    fail_at: int | None = None,
) -> T:
    """Serve an engine that samples `script`, run `test` with a client, return its result."""

    async def run() -> T:
        loaded = LoadedEngine(
            make_engine(script, fail_at=fail_at),
            Checkpoint(_model_config(128), None, {}),
            CONFIG,
            128,
            {},
            phases,
        )
        engine = AsyncEngine(loaded)
        engine.start()
        try:
            async with TestClient(TestServer(make_app(engine, settings))) as client:
                return await test(client)
        finally:
            await engine.shutdown()

    return asyncio.run(run())
