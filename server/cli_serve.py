"""`paged serve`: reserves the port, loads the model, serves until a signal, drains, exits."""

import argparse
import asyncio
import contextlib
import errno
import gc
import logging
import pathlib
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aiohttp import web

from paged.server.app import make_app, make_runner
from paged.server.cli_engine import start_engine
from paged.server.cli_errors import UserError, user_errors
from paged.server.cli_settings import engine_config, server_settings, set_up_logging, tls_files
from paged.server.context import CONTEXT
from paged.server.settings import ServerSettings
from paged.server.tls import make_ssl_context

if TYPE_CHECKING:
    from paged.scheduler.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

type StartEngine = Callable[[], Coroutine[Any, Any, "AsyncEngine"]]


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return 0.

    Raises: UserError for what the user can mend, before or after the model is loaded.
    """
    set_up_logging(args.log_level, args.log_format)
    with user_errors():
        config, settings, tls = engine_config(args), server_settings(args), tls_files(args)
        ssl_context = None if tls is None else make_ssl_context(tls)
    if not (settings.api_keys or args.uds) and args.host not in ("localhost", "127.0.0.1", "::1"):
        logger.warning(
            "Anyone who reaches %s may use this server; set --api-key, or --host 127.0.0.1.",
            args.host,
        )
    if settings.allow_runtime_lora_updating:
        logger.warning(
            "Clients may load LoRA adapters from any folder of this machine; let only those in "
            "whom you trust."
        )
    logger.info("%s", config)
    raise_file_limit()
    listener = reserve_socket(args.uds) if args.uds else reserve_port(args.host, args.port)
    with listener:
        asyncio.run(
            serve_until_stopped(
                lambda: start_engine(args, config),
                settings,
                listener,
                shutdown_timeout=args.shutdown_timeout,
                ssl_context=ssl_context,
            )
        )
    return 0


def raise_file_limit() -> None:
    """Let the process open as many files, and so connections, as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse what they promise
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def reserve_socket(path: str) -> socket.socket:
    """Return a Unix socket bound to a path, not listening yet; one that nobody serves goes.

    Raises: UserError if the path cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if pathlib.Path(path).is_socket():
            try:
                listener.connect(path)
            except ConnectionRefusedError:  # left behind by a server that was killed
                pathlib.Path(path).unlink()
            else:
                raise OSError(errno.EADDRINUSE, "another program serves it")
        listener.bind(path)
        return listener
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise UserError(f"cannot listen on --uds {path}: {reason}.") from None


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not listening yet.

    Done before the model is loaded: a port in use should not cost minutes, and until the socket
    listens, clients and probes are refused rather than kept waiting.

    Raises: UserError if the address cannot be used.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Otherwise a restart would have to wait for the old connections' TIME_WAIT to pass.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        return listener
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None


async def serve_until_stopped(
    start: StartEngine,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    shutdown_timeout: float,
    ssl_context: ssl.SSLContext | None = None,
) -> None:
    """Start an engine, serve it on a bound socket until a signal, let it finish, stop it.

    A first SIGTERM or SIGINT drains: new requests get 503, running ones have `shutdown_timeout`
    seconds. A second one ends them at once.

    Raises: UserError if the engine cannot be started.
    """
    signals = _StopSignals()
    engine = await _start_or_cancel(start, signals)
    try:
        with user_errors():
            app = make_app(engine, settings)
        runner = make_runner(app)
        try:
            with user_errors():
                await runner.setup()
            spare_collector()
            await _listen(runner, listener, ssl_context)
            await signals.first.wait()
            await _drain(app, signals, shutdown_timeout)
            # Before the connections close: whoever still waits is told that the engine has ended.
            await engine.shutdown()
        finally:
            await runner.cleanup()
    finally:
        await engine.shutdown()
    logger.info("Stopped.")


def spare_collector() -> None:
    """Keep Python's cyclic garbage collector out of the steps as far as it goes.

    JAX, a model and a vocabulary are hundreds of thousands of objects that stay until the process
    ends. A full collection that walks them stops every thread for a tenth of a second, so they are
    frozen out of it. Next to no garbage of a step is cyclic, but the futures of 700 waiting streams
    already start a collection each step, hence the higher threshold.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


class _StopSignals:
    """Events set by the first and the second SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _start_or_cancel(start: StartEngine, signals: _StopSignals) -> "AsyncEngine":
    """Return the started engine; if a signal comes first, the start is cancelled."""
    starting = asyncio.create_task(start())
    stopped = asyncio.create_task(signals.first.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
    with user_errors():
        return await starting


async def _listen(
    runner: web.AppRunner, listener: socket.socket, ssl_context: ssl.SSLContext | None
) -> None:
    site = web.SockSite(runner, listener, backlog=1024, ssl_context=ssl_context)
    if listener.family is socket.AF_UNIX:
        await site.start()
        logger.info("Serving on unix:%s", listener.getsockname())
        return
    host, port = listener.getsockname()[:2]
    try:
        await site.start()
    except OSError as error:  # another program that reserved the port like us was faster
        raise _cannot_listen(host, port, error) from None
    shown = f"[{host}]" if ":" in host else host
    logger.info("Serving on %s://%s:%d", "https" if ssl_context else "http", shown, port)


async def _drain(app: web.Application, signals: _StopSignals, timeout_seconds: float) -> None:
    """Refuse new requests and wait for the running ones, a second signal or the timeout."""
    context = app[CONTEXT]
    context.is_draining = True
    logger.info(
        "Stopping: %d requests have %g s to finish; a second signal ends them now.",
        context.engine.num_unfinished,
        timeout_seconds,
    )
    drained = asyncio.create_task(context.engine.drain(timeout_seconds))
    hurried = asyncio.create_task(signals.second.wait())
    _, unfinished = await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"port {port} on {host} is already in use; stop the program that uses it, or choose "
            "another one with --port."
        )
    return UserError(f"cannot listen on {host}:{port}: {error.strerror or error}.")
