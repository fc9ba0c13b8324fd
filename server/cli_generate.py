"""`paged generate`: continues prompts and prints the text."""

import argparse
import asyncio
import sys
from collections import defaultdict

from paged.server.cli_engine import open_client
from paged.server.cli_errors import UserError
from paged.server.cli_settings import sampling_fields, set_up_logging


def run(args: argparse.Namespace) -> int:
    """Print the continuation of each prompt, in order; return 0.

    Raises: UserError if there is no prompt, or the server or the model cannot serve it.
    """
    set_up_logging(args.log_level)
    prompts = args.prompt
    if prompts is None:
        if sys.stdin.isatty():
            raise UserError("there is no prompt; give --prompt TEXT, or pipe one in.")
        prompts = [sys.stdin.read()]
    asyncio.run(_generate(args, prompts))
    return 0


async def _generate(args: argparse.Namespace, prompts: list[str]) -> None:
    """Generate for all prompts at once; the first unfinished one is printed as it comes."""
    waiting: defaultdict[int, list[str]] = defaultdict(list)
    finished: set[int] = set()
    shown = 0
    async with open_client(args) as client:
        async for index, text, is_last in client.complete(prompts, sampling_fields(args)):
            waiting[index].append(text)
            if is_last:
                finished.add(index)
            while shown < len(prompts):
                print("".join(waiting.pop(shown, [])), end="", flush=True)
                if shown not in finished:
                    break
                print()
                shown += 1
