"""The engine that the command line's options describe, and a private server around it."""

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from paged.scheduler.config import EngineConfig
from paged.scheduler.params import MAX_STOP_STRINGS
from paged.server.cli_errors import UserError, user_errors
from paged.server.cli_settings import (
    engine_config,
    key_from_environment,
    lora_modules,
    models_cache_dir,
)
from paged.server.client import Client
from paged.server.settings import LoRAModule, PoolerConfig, ServerSettings

if TYPE_CHECKING:
    from paged.scheduler.async_engine import AsyncEngine


async def start_engine(args: argparse.Namespace, config: EngineConfig) -> "AsyncEngine":
    """Load the model that the command line names and start its engine.

    Raises: what `load_engine` raises.
    """
    # Imported here: JAX takes seconds, and a mistake in the options should show before.
    from paged.scheduler.async_engine import AsyncEngine
    from paged.scheduler.loading import load_engine

    try:
        loaded = await asyncio.to_thread(
            load_engine,
            args.model,
            config,
            progress=sys.stderr.isatty(),
            revision=args.revision,
            token=args.hf_token,
            models_cache_dir=models_cache_dir(),
        )
    except asyncio.CancelledError:
        # The thread may sit in the compiler for minutes, and a normal exit would wait for it.
        # There is nothing to put in order: nobody has been served yet.
        print("paged: stopped while loading", file=sys.stderr, flush=True)
        os._exit(130)
    engine = AsyncEngine(loaded)
    engine.start()
    return engine


@contextlib.asynccontextmanager
async def open_client(
    args: argparse.Namespace, *, served_model_names: Sequence[str] = ()
) -> AsyncIterator[Client]:
    """Yield a client of the server at `args.url`, or of one that lives as long as the client.

    The private server runs the same code as `paged serve` on a free port of the loopback address,
    behind a random key.

    Args:
      args: of the command.
      served_model_names: of the private server; empty: the model's own.

    Raises: UserError if the model, or an adapter, cannot be loaded.
    """
    modules = lora_modules(args)
    pooler_config = getattr(args, "pooler_config", PoolerConfig())
    if args.url is not None:
        if pooler_config != PoolerConfig():
            raise UserError(
                "--pooler-config is for a model that is loaded here; with --url, start the server "
                "with it."
            )
        if modules:
            raise UserError(
                "adapters of the command line need a model that is loaded here; with --url, name "
                "one that the server has as MODEL."
            )
        key = args.api_key or key_from_environment()
        async with Client(args.url, api_key=key, model=args.model) as client:
            yield client
        return
    with user_errors():
        config = engine_config(args)
        print(f"Loading {args.model or 'the demo model'} ...", file=sys.stderr)
        engine = await start_engine(args, config)
    try:
        # A command with one adapter has no other model.
        model = None if getattr(args, "lora", None) is None else args.lora.name
        serving = serve_privately(
            engine,
            served_model_names,
            lora_modules=modules,
            model=model,
            pooler_config=pooler_config,
        )
        async with serving as client:
            yield client
    finally:
        await engine.shutdown()


@contextlib.asynccontextmanager
async def serve_privately(
    engine: "AsyncEngine",
    served_model_names: Sequence[str] = (),
    *,
    lora_modules: Sequence[LoRAModule] = (),
    model: str | None = None,
    pooler_config: PoolerConfig | None = None,
) -> AsyncIterator[Client]:
    """Yield the client of a server that nobody else can use.

    Args:
      engine: to be served.
      served_model_names: of the base model; empty: its own.
      lora_modules: adapters.
      model: that the client names; None: the base model.
      pooler_config: how embeddings are made; None: as the model asks for.

    Raises: UserError if an adapter cannot be loaded.
    """
    from aiohttp import web

    from paged.server.app import make_app, make_runner

    key = secrets.token_urlsafe()
    with user_errors():
        settings = ServerSettings(
            api_keys=(key,),
            served_model_names=tuple(served_model_names),
            lora_modules=tuple(lora_modules),
            pooler_config=pooler_config or PoolerConfig(),
            # Its only client is the one who has started it, who has no flags to bound himself.
            max_stop_strings=MAX_STOP_STRINGS,
            log_stats=False,
        )
        app = make_app(engine, settings)
    runner = make_runner(app)
    try:
        with user_errors():
            await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with Client(f"http://127.0.0.1:{port}/v1", api_key=key, model=model) as client:
            yield client
    finally:
        await runner.cleanup()
