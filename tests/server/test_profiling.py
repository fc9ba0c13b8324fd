"""`/start_profile`, `/stop_profile`: there with a folder only; a profile is a file of JAX's."""

import pytest

from paged.server.observability import ObservabilitySettings
from paged.server.settings import ServerSettings
from tests.scheduler.fakes import spell
from tests.server.fake_engine import FakeEngine
from tests.server.fake_serving import with_engine
from tests.server.serving import COMPLETIONS, Client, checked_error, with_server


def answers(*paths: str, engine: FakeEngine | None = None, profile_dir: str | None = "/x"):
    async def test(client: Client) -> list:
        result = []
        for path in paths:
            async with client.post(path) as response:
                body = None if response.status == 200 else await response.json()
                result.append((response.status, body))
        return result

    settings = ObservabilitySettings(profile_dir=profile_dir)
    return with_server(test, engine, observability=settings)


def test_there_is_no_profiler_without_a_folder():
    assert [s for s, _ in answers("/start_profile", "/stop_profile", profile_dir=None)] == [404] * 2


def test_profiles_are_taken_one_after_the_other():
    engine = FakeEngine()
    got = answers(
        "/start_profile",
        "/start_profile",
        "/stop_profile",
        "/stop_profile",
        "/start_profile?num_steps=5",
        engine=engine,
    )
    assert [status for status, _ in got] == [200, 409, 200, 409, 200]
    assert "already; stop it" in checked_error(got[1][1], 409)["message"]
    assert engine.profiles == [("/x", None), "stopped", ("/x", 5)]


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1_0", "1000000"])
def test_a_wrong_number_of_steps_is_refused(text):
    ((status, body),) = answers(f"/start_profile?num_steps={text}")
    assert status == 400
    assert checked_error(body, 400)["param"] == "num_steps"


def test_a_trace_is_written_after_so_many_steps(tmp_path):
    def files() -> list:
        return list(tmp_path.rglob("*.xplane.pb"))

    async def test(client: Client) -> None:
        async with client.post("/start_profile?num_steps=3") as response:
            assert response.status == 200, await response.text()
        async with client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5}) as response:
            assert response.status == 200
        assert len(files()) == 1
        async with client.post("/stop_profile") as response:
            assert response.status == 409, "it has ended by itself"

    settings = ServerSettings(observability=ObservabilitySettings(profile_dir=str(tmp_path)))
    with_engine(test, spell("hello"), settings)
