"""`paged chat`: a conversation in the terminal."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator

from paged.server.cli_engine import open_client
from paged.server.cli_settings import sampling_fields, set_up_logging
from paged.server.client import Client


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input (Ctrl-D) or Ctrl-C at the prompt; return 0.

    Ctrl-C during an answer ends the answer, not the conversation.

    Raises: UserError if the server cannot be reached or the model not be loaded.
    """
    set_up_logging(args.log_level)
    # One loop, run piece by piece: in between, the terminal belongs to `input`.
    with asyncio.Runner() as loop:
        opened = open_client(args)
        client = loop.run(opened.__aenter__())
        try:
            _converse(args, loop, client)
        finally:
            loop.run(opened.__aexit__(None, None, None))
    return 0


def _converse(args: argparse.Namespace, loop: asyncio.Runner, client: Client) -> None:
    sampling = sampling_fields(args)
    messages = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})
    while True:
        text = args.quick if args.quick is not None else _next_message()
        if text is None:
            return
        messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            loop.run(_print_answer(client.chat(messages, sampling), answer))
        except KeyboardInterrupt:
            print(" [interrupted]")
            # Lets the connection close, so that nothing is generated for nobody meanwhile.
            loop.run(asyncio.sleep(0.1))
        if args.quick is not None:
            return
        messages.append({"role": "assistant", "content": "".join(answer)})


def _next_message() -> str | None:
    """Return the next line that is not empty, None at the end of the input."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if text := input("> ").strip():
                return text
    print()
    return None


async def _print_answer(pieces: AsyncIterator[str], answer: list[str]) -> None:
    """Print the pieces as they come and collect them in `answer`."""
    async for piece in pieces:
        answer.append(piece)
        print(piece, end="", flush=True)
    print()
