"""`paged doctor`: asks a running server what holds its requests back."""

import argparse
import asyncio
import dataclasses
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tqdm import tqdm
from yarl import URL

from paged.server.cli_errors import UserError
from paged.server.cli_settings import key_from_environment
from paged.server.doctor import Finding, Reading, diagnose, parse_metrics
from paged.server.prompt_difference import PromptDifference, compare_prompts

_WIDTH = 96
_DEFAULT_BLOCK_SIZE = 16
_WAIT_SECONDS = 10.0
_LOOK_SECONDS = 0.2


def run(args: argparse.Namespace) -> int:
    """Print what the server suffers from, or where two prompts part; return 0.

    Raises: UserError if the server cannot be asked, or a prompt cannot be read.
    """
    if args.compare:
        difference = asyncio.run(_compare(args))
        _print(args, dataclasses.asdict(difference), _difference_lines(difference))
        return 0
    findings = asyncio.run(_examine(args))
    lines = [line for finding in findings for line in _finding_lines(finding)]
    _print(args, {"findings": [finding.to_json() for finding in findings]}, lines)
    return 0


async def _examine(args: argparse.Namespace) -> list[Finding]:
    async with _session(args) as session:
        clock = asyncio.get_running_loop().time
        first, started = await _read(session, args.url), clock()
        with tqdm(
            total=args.seconds,
            desc="Watching",
            bar_format="{desc}: {bar} {n:.0f}/{total:.0f} s",
            disable=not sys.stderr.isatty(),
            leave=False,
        ) as bar:
            between = []
            while (left := started + args.seconds - clock()) > 0:
                await asyncio.sleep(min(_LOOK_SECONDS, left))
                between.append(await _read(session, args.url))
                bar.update(min(clock() - started, args.seconds) - bar.n)
        second = await _read(session, args.url)
        return diagnose(first, second, clock() - started, between)


async def _compare(args: argparse.Namespace) -> PromptDifference:
    bodies = [_tokenize_body(path) for path in args.compare]
    async with _session(args) as session:
        block_size = (await _read(session, args.url)).setting("block_size")
        first, second = [
            await _tokens(session, args.url, body, path)
            for body, path in zip(bodies, args.compare, strict=True)
        ]
    return compare_prompts(first, second, block_size or _DEFAULT_BLOCK_SIZE)


def _tokenize_body(path: Path) -> dict[str, Any]:
    """Return the body of a /tokenize request: of a chat request, or of a text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}") from error
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return {"prompt": text}
    if "messages" in body:
        # Sampling fields do not change the prompt, and /tokenize does not know them all.
        kept = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")
        return {key: body[key] for key in kept if key in body}
    if isinstance(body.get("prompt"), str):
        return {"prompt": body["prompt"]}
    raise UserError(
        f"{path} holds a JSON object without `messages` and without a text as `prompt`; give the "
        "body of a request, or a text."
    )


def _session(args: argparse.Namespace) -> aiohttp.ClientSession:
    key = args.api_key or key_from_environment()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=_WAIT_SECONDS)
    )


def _address(url: str, path: str) -> URL:
    try:
        base = URL(url)
    except ValueError:
        base = URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise UserError(f"{url} is no address; write http://HOST:PORT.")
    return base.with_path(base.path.removesuffix("/").removesuffix("/v1") + path)


async def _read(session: aiohttp.ClientSession, url: str) -> Reading:
    address = _address(url, "/metrics")
    try:
        async with session.get(address) as response:
            if response.status != 200:
                raise UserError(f"{address} answered {response.status} {response.reason}.")
            return parse_metrics(await response.text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UserError(
            f"{address} cannot be read: {str(error) or 'no answer in time'}."
        ) from error
    except ValueError as error:
        raise UserError(f"{address} is no page of vLLM's metrics: {error}.") from error


async def _tokens(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], path: Path
) -> list[str]:
    address = _address(url, "/tokenize")
    try:
        async with session.post(address, json={**body, "return_token_strs": True}) as response:
            answer = msgspec.json.decode(await response.read())
            if response.status == 200:
                strings: list[str] = answer["token_strs"]
                return strings
            reason = answer.get("error", {}).get("message", response.reason)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise UserError(
            f"{address} cannot be used: {str(error) or 'no answer in time'}."
        ) from error
    raise UserError(f"{address} refuses {path}: {reason}")


def _print(args: argparse.Namespace, result: dict[str, Any], lines: list[str]) -> None:
    if args.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines))


def _finding_lines(finding: Finding) -> list[str]:
    lines = textwrap.wrap(finding.summary, _WIDTH)
    for label, sentences in (("seen", finding.evidence), ("do", finding.advice)):
        for sentence in sentences:
            lead = f"  {label:4}  "
            lines += textwrap.wrap(
                sentence, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead)
            )
    return [*lines, ""]


def _difference_lines(difference: PromptDifference) -> list[str]:
    equal, (first, second) = difference.num_equal, difference.lengths
    lines = [
        f"The prompts have {first:,} and {second:,} tokens; the first {equal:,} are the same.",
        f"In whole blocks that are {difference.num_shared:,} tokens which the second takes from "
        "the cache.",
    ]
    if any(difference.tokens):
        ours, theirs = (repr(token) if token else "its end" for token in difference.tokens)
        lines.append(f"Then {ours} stands against {theirs}, after {difference.before!r}.")
    return lines
