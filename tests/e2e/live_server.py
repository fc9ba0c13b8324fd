"""A server of a real engine on a thread of its own, for clients that block."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future

from aiohttp import web

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.config import EngineConfig
from paged.server.app import make_app, make_runner
from paged.server.settings import ServerSettings


def live_server(
    model: str, config: EngineConfig, settings: ServerSettings
) -> contextlib.AbstractContextManager[str]:
    """Serve a model; see `serving`."""
    return serving(lambda: AsyncEngine.create(model, config, progress=False), settings)


@contextlib.contextmanager
def serving(
    start: Callable[[], Awaitable[AsyncEngine]],
    settings: ServerSettings,
    *,
    shutdown_timeout: float = 5.0,
) -> Iterator[str]:
    """Yield the URL, without a path, of a server whose engine is started on its event loop."""
    url: Future[str] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        engine = await start()
        runner = make_runner(make_app(engine, settings), shutdown_timeout=shutdown_timeout)
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            loops.append(asyncio.get_running_loop())
            url.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
            await stop.wait()
        finally:
            await runner.cleanup()
            await engine.shutdown()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if url.done():
                raise
            url.set_exception(error)

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=run, name="live-server")
    thread.start()
    try:
        yield url.result()
    finally:
        if loops:
            loops[0].call_soon_threadsafe(stop.set)
        thread.join()
