"""`Server-Timing` on demand."""

import re

import pytest

from paged.server.settings import ServerSettings
from tests.scheduler.fakes import spell
from tests.server.fake_serving import with_engine
from tests.server.serving import COMPLETIONS, Client


def timing_of(body: dict, headers: dict[str, str], path: str = COMPLETIONS) -> str | None:
    async def test(client: Client) -> str | None:
        async with client.post(path, json=body, headers=headers) as response:
            await response.read()
            return response.headers.get("Server-Timing")

    return with_engine(test, spell("hello"), ServerSettings())


WANTED = {"X-Request-Timing": "1"}


@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
def test_an_answer_says_where_its_time_went(prompt):
    text = timing_of({"prompt": prompt, "max_tokens": 3}, WANTED)
    times = dict(re.findall(r"(\w+);dur=([0-9.]+)", text or ""))
    queue, prefill, decode, total = (float(times[n]) for n in times)
    assert list(times) == ["queue", "prefill", "decode", "total"]
    assert decode > 0
    assert queue + prefill + decode <= total + 0.01


@pytest.mark.parametrize("headers", [{}, {"X-Request-Timing": "0"}])
def test_nobody_is_told_who_did_not_ask(headers):
    assert timing_of({"prompt": "abc", "max_tokens": 3}, headers) is None


def test_streams_and_what_needs_no_engine_have_no_times():
    assert timing_of({"prompt": "abc", "max_tokens": 3, "stream": True}, WANTED) is None
    assert timing_of({"prompt": "abc"}, WANTED, "/tokenize") is None
