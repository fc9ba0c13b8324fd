"""Priority, cache mode and cache salt: from body, headers and API key to the engine."""

import hashlib

import pytest

from paged.scheduler.request import CacheMode
from tests.server.fake_engine import FakeEngine, Seen
from tests.server.serving import CHAT, COMPLETIONS, Client, error_of, ok, with_server

BODIES = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
both = pytest.mark.parametrize("path", BODIES)
KEYS = ("first-key", "second-key")
MOST, LEAST = 2**63 - 1, -(2**63)


def seen_by_engine(path, *, headers=None, settings=None, **fields) -> Seen:
    engine = FakeEngine()
    ok(path, {**BODIES[path], **fields}, engine, headers=headers, **(settings or {}))
    (seen,) = engine.seen
    return seen


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@both
def test_a_request_that_says_nothing_is_handled_as_usual(path):
    seen = seen_by_engine(path)
    assert (seen.priority, seen.cache_mode, seen.cache_salt) == (0, CacheMode.DEFAULT, None)


@both
@pytest.mark.parametrize("priority", [-3, 0, 7, MOST, LEAST])
def test_priority_of_the_body_arrives(path, priority):
    assert seen_by_engine(path, priority=priority).priority == priority


@both
@pytest.mark.parametrize(
    ("header", "priority"),
    [("-3", -3), ("+4", 4), (" 5 ", 5), ("0", 0), (str(MOST), MOST), (str(LEAST), LEAST)],
)
def test_priority_of_the_header_overrides_that_of_the_body(path, header, priority):
    seen = seen_by_engine(path, headers={"X-Vllm-Priority": header}, priority=9)
    assert seen.priority == priority


@pytest.mark.parametrize(
    "header",
    ["", "high", "1.5", "1_0", "٣", "--1", "1 2", str(MOST + 1), str(LEAST - 1), "9" * 5000],
)
def test_a_header_that_is_no_priority_is_ignored(header):
    headers = {"X-Vllm-Priority": header.encode().decode("latin-1")}
    assert seen_by_engine(COMPLETIONS, headers=headers, priority=9).priority == 9


@both
@pytest.mark.parametrize("priority", ["one", 1.5, True, MOST + 1, LEAST - 1, 10**400, [1]])
def test_a_priority_that_is_no_64_bit_integer_is_refused(path, priority):
    engine = FakeEngine()
    error = error_of(path, {**BODIES[path], "priority": priority}, engine)
    assert (error["param"], error["type"]) == ("body.priority", "Bad Request")
    assert engine.seen == []


@both
@pytest.mark.parametrize("mode", CacheMode)
def test_cache_mode_arrives(path, mode):
    assert seen_by_engine(path, cache=mode.value).cache_mode is mode
    assert seen_by_engine(path, cache=None).cache_mode is CacheMode.DEFAULT


@both
@pytest.mark.parametrize("mode", ["", "nostore", "PIN", 1, True, ["pin"], {"no-cache": True}])
def test_an_unknown_cache_mode_is_refused_with_the_choices(path, mode):
    engine = FakeEngine()
    error = error_of(path, {**BODIES[path], "cache": mode}, engine)
    assert (error["param"], error["type"]) == ("cache", "BadRequestError")
    assert error["message"].startswith("cache must be one of default, no_store, pin, got ")
    assert engine.seen == []


def test_every_prompt_of_a_request_is_handled_alike():
    engine = FakeEngine()
    body = {"prompt": ["a", "b", "c"], "priority": 4, "cache": "pin", "cache_salt": "s"}
    ok(COMPLETIONS, {**body, "max_tokens": 1}, engine)
    handled = {(seen.priority, seen.cache_mode, seen.cache_salt) for seen in engine.seen}
    assert (len(engine.seen), handled) == (3, {(4, CacheMode.PIN, "s")})


@both
@pytest.mark.parametrize("settings", [{}, {"api_keys": KEYS[:1]}, {"api_keys": KEYS[:1] * 2}])
def test_with_one_tenant_only_the_salt_of_the_body_counts(path, settings):
    for salt in (None, "mine"):
        seen = seen_by_engine(path, headers=bearer(KEYS[0]), settings=settings, cache_salt=salt)
        assert seen.cache_salt == salt


def salt_of(key: str, path: str = COMPLETIONS, **fields) -> str:
    seen = seen_by_engine(path, headers=bearer(key), settings={"api_keys": KEYS}, **fields)
    assert seen.cache_salt is not None
    return seen.cache_salt


@both
def test_each_of_several_keys_has_salts_of_its_own(path):
    first, second = (salt_of(key, path) for key in KEYS)
    salted = [salt_of(key, path, cache_salt="mine") for key in KEYS]
    assert len({first, second, *salted}) == 4
    assert first == salt_of(KEYS[0], path), "a tenant shares with itself"
    assert salted[0] == salt_of(KEYS[0], path, cache_salt="mine")


def test_endpoints_share_the_salts_of_a_key():
    assert salt_of(KEYS[0], COMPLETIONS) == salt_of(KEYS[0], CHAT)


def test_no_salt_of_a_body_reaches_another_tenant():
    victim = salt_of(KEYS[1], cache_salt="s")
    # Even who knew the other's digest would have to send it behind his own.
    stolen = victim.split("/")[0]
    got = {salt_of(KEYS[0], cache_salt=salt) for salt in (stolen, "s", victim.replace("/", "."))}
    assert victim not in got
    error_of(
        COMPLETIONS,
        {**BODIES[COMPLETIONS], "cache_salt": victim},
        headers=bearer(KEYS[0]),
        api_keys=KEYS,
    )


def test_a_salt_tells_neither_the_key_nor_the_digest_that_opens_the_door():
    salt = salt_of(KEYS[0])
    assert KEYS[0] not in salt
    assert hashlib.sha256(KEYS[0].encode()).hexdigest() not in salt


def test_salts_per_key_can_be_turned_off():
    settings = {"api_keys": KEYS, "cache_salt_per_key": False}
    for salt in (None, "mine"):
        seen = seen_by_engine(
            COMPLETIONS, headers=bearer(KEYS[0]), settings=settings, cache_salt=salt
        )
        assert seen.cache_salt == salt


@pytest.mark.parametrize("path", ["/v1//completions", "/v1///completions"])
def test_no_spelling_of_the_path_loses_the_salt(path):
    engine = FakeEngine()

    async def test(client: Client) -> None:
        body = BODIES[COMPLETIONS]
        async with client.post(path, json=body, headers=bearer(KEYS[0])) as response:
            assert response.status == 200

    with_server(test, engine, api_keys=KEYS)
    assert engine.seen[0].cache_salt == salt_of(KEYS[0])


def test_spellings_of_the_scheme_are_one_tenant():
    engine = FakeEngine()
    for value in (f"Bearer {KEYS[0]}", f"bearer   {KEYS[0]} "):
        ok(
            COMPLETIONS,
            BODIES[COMPLETIONS],
            engine,
            headers={"Authorization": value},
            api_keys=KEYS,
        )
    assert len({seen.cache_salt for seen in engine.seen}) == 1
