"""API keys: every route is closed but for the probes, whatever is added later."""

import pytest
from aiohttp import web

from paged.server.app import make_app
from paged.server.playground import PAGE_PATHS
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Client, checked_error, connection, with_server

KEYS = {"api_keys": ("first-key", "second-key")}
OPEN = {("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/metrics")}
OPEN |= {("GET", path) for path in PAGE_PATHS}
UNKNOWN = [
    ("GET", "/ui/"),
    ("GET", "/nope"),
    ("GET", "/v1//x"),
    ("GET", "/health/"),
    ("PUT", "/v1"),
]


def all_routes() -> list[tuple[str, str]]:
    settings = ServerSettings(dev_mode=True, allow_runtime_lora_updating=True)
    app = make_app(FakeEngine(), settings)
    routes = {(route.method, route.resource.canonical) for route in app.router.routes()}
    return sorted((m, path.replace("{model}", "tiny")) for m, path in routes if m != "HEAD")


def statuses(routes, headers=None, **settings) -> dict[tuple[str, str], int]:
    async def test(client: Client) -> dict[tuple[str, str], int]:
        result = {}
        for method, path in routes:
            async with client.request(method, path, headers=headers) as response:
                result[method, path] = response.status
                if response.status == 401:
                    error = checked_error(await response.json(), 401)
                    assert error["type"] == "AuthenticationError"
                    assert response.headers["WWW-Authenticate"] == "Bearer"
        return result

    return with_server(test, **settings)


def test_every_route_but_the_probes_needs_a_key():
    routes = all_routes()
    assert len(routes) == 22 + len(PAGE_PATHS)
    settings = {"dev_mode": True, "allow_runtime_lora_updating": True}
    for route, status in statuses(routes, **settings, **KEYS).items():
        assert (status == 401) == (route not in OPEN), (route, status)


def test_metrics_can_be_closed_too():
    got = statuses(all_routes(), metrics_require_key=True, **KEYS)
    assert {route for route, status in got.items() if status != 401} == OPEN - {("GET", "/metrics")}


def test_unknown_routes_are_closed():
    assert set(statuses(UNKNOWN, **KEYS).values()) == {401}


@pytest.mark.parametrize(
    "target",
    [
        b"//v1/models",
        b"/v1//models",
        b"/health/../v1/models",
        b"/health//../v1/models",
        b"/%76%31/models",
        b"/health%2f..%2fv1/models",
        b"/health;/../v1/models",
        b"http://x/v1/models",
        b"http://x//v1/models",
        b"//health/v1/models",
        b"/v1/models?/health",
        b"/v1/models#/health",
    ],
)
def test_no_spelling_of_a_path_gets_around_the_key(target):
    async def test(client: Client) -> bytes:
        request = b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        async with connection(client, request) as (reader, _):
            return await reader.read()

    answer = with_server(test, **KEYS)
    assert answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.0 400 "))
    assert b"tiny" not in answer


def test_options_are_closed_because_there_is_no_cors():
    assert set(statuses([("OPTIONS", path) for _, path in all_routes()], **KEYS).values()) == {
        401,
        405,
    }
    assert statuses([("OPTIONS", "/v1/models")], **KEYS)["OPTIONS", "/v1/models"] == 401


@pytest.mark.parametrize(
    "value",
    [
        "Bearer wrong",
        "Bearer",
        "Bearer ",
        "Basic first-key",
        "first-key",
        "Bearer first-keyx",
        "Bearer first-ke",
        "Bearer first-key second-key",
        "Bearerfirst-key",
    ],
)
def test_wrong_key_is_refused(value):
    got = statuses([("GET", "/v1/models")], {"Authorization": value}, **KEYS)
    assert list(got.values()) == [401]


@pytest.mark.parametrize(
    "value", ["Bearer first-key", "Bearer second-key", "bearer first-key", "BEARER  first-key "]
)
def test_every_key_opens_every_route(value):
    got = statuses(all_routes(), {"Authorization": value}, **KEYS)
    assert 401 not in got.values()


def test_nothing_is_asked_without_keys():
    assert 401 not in statuses(all_routes()).values()


def test_a_route_added_later_is_closed():
    async def handler(_request: web.Request) -> web.Response:
        return web.Response()

    async def test(client: Client) -> int:
        async with client.get("/new") as response:
            return response.status

    app = make_app(FakeEngine(), ServerSettings(**KEYS))
    app.router.add_get("/new", handler)
    assert with_server(test, app=app) == 401


def test_key_does_not_show_in_the_settings_text():
    assert "first-key" not in repr(ServerSettings(**KEYS))


@pytest.mark.parametrize("name", ["api_keys", "served_model_names"])
def test_empty_key_or_name_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must not hold an empty string"):
        ServerSettings(**{name: ("a", "")})


def test_body_limit_must_be_positive():
    with pytest.raises(ValueError, match="client_max_size=0 must be at least 1 byte"):
        ServerSettings(client_max_size=0)
