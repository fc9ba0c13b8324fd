"""The page and what it asks: files, headers, keys, snapshots shared by all who look."""

import asyncio
import dataclasses
import json
import re

import pytest

from paged.scheduler.errors import EngineDeadError
from paged.scheduler.output import StepStats
from paged.scheduler.snapshot import RequestSnapshot
from paged.server.engine_state import EngineWatch
from paged.server.playground import PAGE_PATHS
from tests.server.fake_engine import EMPTY, FakeEngine
from tests.server.serving import Client, checked_error, with_server
from tests.test_packaging import ROOT

UI = ROOT / "server" / "ui"
STATE = "/engine/state"


def get(path, engine=None, *, headers=None, **settings):
    """Return status, headers and text of one GET."""

    async def test(client: Client):
        async with client.get(path, headers=headers) as response:
            return response.status, response.headers, await response.text()

    return with_server(test, engine, **settings)


def get_json(path, engine=None, *, status=200, **settings):
    got, _, text = get(path, engine, **settings)
    assert got == status, text
    return json.loads(text)


@pytest.mark.parametrize(("path", "media"), PAGE_PATHS.items())
def test_every_file_is_served_as_what_it_is_and_loads_nothing_from_elsewhere(path, media):
    status, headers, text = get(path)
    assert status == 200
    assert headers["Content-Type"] == f"{media}; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a name of a namespace, which is not loaded"
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|\son\w+=", text)


def test_every_file_is_listed_and_every_reference_leads_to_one():
    files = {f"/ui/{file.name}" for file in UI.iterdir()} - {"/ui/index.html"} | {"/"}
    assert files == set(PAGE_PATHS)
    page = (UI / "index.html").read_text()
    assert {f"/{name}" for name in re.findall(r'(?:href|src)="(ui/[^"]+)"', page)} <= files
    for script in UI.glob("*.js"):
        imports = re.findall(r'from "\./([^"]+)"', script.read_text())
        assert {f"/ui/{name}" for name in imports} <= files


def test_a_file_that_the_browser_has_is_not_sent_again():
    _, headers, _ = get("/ui/app.js")
    status, again, text = get("/ui/app.js", headers={"If-None-Match": headers["ETag"]})
    assert (status, text) == (304, "")
    assert again["ETag"] == headers["ETag"]
    assert get("/ui/app.js", headers={"If-None-Match": '"other"'})[0] == 200


@pytest.mark.parametrize("path", ["/", "/ui/app.js", STATE])
def test_without_ui_nothing_of_it_is_there(path):
    error = checked_error(get_json(path, status=404, ui=False), 404)
    assert error["message"] == f"There is no route GET {path}."


def test_the_page_is_open_where_keys_are_asked_for_and_the_engine_is_not():
    assert get("/", api_keys=("secret",))[0] == 200
    assert get("/ui/api.js", api_keys=("secret",))[0] == 200
    assert get(STATE, api_keys=("secret",))[0] == 401
    assert get(STATE, headers={"Authorization": "Bearer secret"}, api_keys=("secret",))[0] == 200
    assert get("/", api_keys=("secret",), ui=False)[0] == 401


def request(request_id="chatcmpl-1-0-0123abcd", **fields) -> RequestSnapshot:
    known = RequestSnapshot(
        request_id=request_id,
        index=0,
        num_samples=1,
        cache_salt=None,
        status="running",
        num_prompt_tokens=20,
        num_computed_tokens=24,
        num_tokens=25,
        max_num_tokens=60,
        num_cached_tokens=16,
        num_blocks=2,
        num_preemptions=1,
    )
    return dataclasses.replace(known, **fields)


def test_the_state_says_what_the_engine_holds():
    requests = (request(), request("0_chatcmpl-2-0-89abcdef", num_samples=2, index=1))
    state = dataclasses.replace(
        EMPTY,
        ref_counts=[0, 3, 1, 0, *[0] * 61],
        keys=[None, b"a", b"b", b"c", *[None] * 61],
        num_running=2,
        num_waiting=1,
        requests=requests,
    )
    seen = get_json(STATE, FakeEngine(state=state))
    blocks = seen["blocks"]
    assert [blocks[name] for name in ("total", "free", "cached", "used", "shared")] == [
        64, 61, 1, 1, 1,
    ]  # fmt: skip
    assert blocks["cells_holders"][:4] == [3, 1, 0, 0]
    assert blocks["cells_cached"][:4] == [0, 0, 1, 0]
    assert (seen["running"], seen["waiting"]) == (2, 1)
    assert seen["requests"][0] == {
        "id": "0123abcd",
        "state": "running",
        "prompt": 20,
        "computed": 24,
        "total": 25,
        "limit": 60,
        "cached": 16,
        "blocks": 2,
        "preemptions": 1,
    }
    assert seen["requests"][1]["id"] == "89abcdef.1"


def test_a_large_pool_is_summed_up():
    state = dataclasses.replace(EMPTY, ref_counts=[0] * 100_001, keys=[None] * 100_001)
    blocks = get_json(STATE, FakeEngine(state=state))["blocks"]
    assert blocks["blocks_per_cell"] == 25
    assert len(blocks["cells_held"]) == 4000


def test_totals_are_those_of_the_metrics():
    engine = FakeEngine()

    async def test(client: Client):
        engine.emit(
            StepStats(
                num_running=1,
                num_waiting=0,
                kv_cache_usage=0.5,
                num_prompt_tokens=50,
                num_generation_tokens=7,
                prefix_queries=40,
                prefix_hits=30,
                num_preempted=2,
            )
        )
        async with client.get(STATE) as response:
            return (await response.json())["totals"]

    assert with_server(test, engine) == {
        "generation_tokens": 7,
        "prompt_tokens": 50,
        "prefix_queries": 40,
        "prefix_hits": 30,
        "preemptions": 2,
    }


def test_tenants_see_their_own_requests_only():
    engine = FakeEngine()

    async def test(client: Client):
        async def ask(key):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "a", "max_tokens": 1}
            await (await client.post("/v1/completions", json=body, headers=headers)).read()
            salt = engine.seen[-1].cache_salt
            requests = (request(cache_salt=salt), request(cache_salt="x/"), request())
            engine.state = dataclasses.replace(EMPTY, requests=requests, num_running=3)
            await asyncio.sleep(0.25)  # longer than a snapshot is kept
            async with client.get(STATE, headers=headers) as response:
                return await response.json()

        return await ask("one"), await ask("two")

    for seen in with_server(test, engine, api_keys=("one", "two")):
        assert len(seen["requests"]) == 1
        assert seen["running"] == 3


def test_a_dead_engine_is_an_error_with_its_reason():
    engine = FakeEngine(health=EngineDeadError("The engine has failed: scripted."))
    error = checked_error(get_json(STATE, engine, status=503), 503)
    assert "scripted" in error["message"]


def test_many_who_look_cost_one_snapshot():
    engine = FakeEngine()
    now = [0.0]

    async def look_often():
        watch = EngineWatch(engine, min_interval_seconds=1, clock=lambda: now[0])
        assert engine.num_snapshots == 0, "nothing is asked for while nobody looks"
        await asyncio.gather(*(watch.look() for _ in range(50)))
        assert engine.num_snapshots == 1
        now[0] = 0.9
        await watch.look()
        assert engine.num_snapshots == 1
        now[0] = 1.0
        await watch.look()
        assert engine.num_snapshots == 2

    asyncio.run(look_often())


def test_who_goes_away_takes_nothing_from_the_others():
    async def scenario():
        gate = asyncio.Event()

        class Slow(FakeEngine):
            async def snapshot(self):
                await gate.wait()
                return await super().snapshot()

        watch = EngineWatch(Slow())
        first, second = (asyncio.create_task(watch.look()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        gate.set()
        return (await second).blocks.total

    assert asyncio.run(scenario()) == 64
