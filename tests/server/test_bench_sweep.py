"""`paged bench sweep`: every point is measured, the knee is found, servers come and go."""

import json
import math
import re

import pytest

from paged.server.bench_chart import Chart, Series, distribution
from paged.server.bench_server import started_server
from paged.server.bench_sweep import best_goodput, combinations, knees
from paged.server.cli import main
from paged.server.cli_errors import UserError
from tests.server.process import ServerProcess, fake_server

SMALL = ["--vocab-size=250", "--random-input-len=10", "--random-output-len=4", "--disable-tqdm"]


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    for name in ("PAGED_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> ServerProcess:
    with fake_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def sweep(*options: str) -> int:
    return main(["bench", "sweep", *SMALL, *options])


def queue(load: float) -> dict:
    """A server with one place, M/M/1, of capacity 1: its time in system is 1 / (1 - load)."""
    return {
        "values": {"request-rate": f"{load:g}"},
        "request_throughput": load,
        "mean_e2el_ms": 1e3 / (1 - load),
    }


def test_knee_of_a_queue_is_where_theory_has_it():
    # Power is load * (1 - load): greatest at one half (Kleinrock 1979).
    points = [queue(load / 10) for load in range(1, 10)]
    assert [point["values"] for point in knees(points, "request-rate")] == [{"request-rate": "0.5"}]
    assert knees(points[:2], "request-rate") == []


def test_groups_have_a_knee_each_and_failed_points_none():
    points = []
    for name, factor in (("a", 1.0), ("b", 0.4)):
        for load in range(1, 10):
            point = queue(load / 10 * factor)
            points.append(point | {"values": point["values"] | {"policy": name}})
    points.append({"values": {"request-rate": "9", "policy": "a"}, "error": "no"})
    # The second group ends before its knee, at 0.36 of the capacity.
    found = [point["request_throughput"] for point in knees(points, "request-rate")]
    assert found == pytest.approx([0.5, 0.36])


def test_best_goodput_is_the_greatest_of_those_there_are():
    points = [{"request_goodput": value} for value in (None, 1.0, 3.0, 2.0)]
    assert best_goodput(points) == points[2]
    assert best_goodput(points[:1]) is None


def test_values_are_combined_the_last_fastest():
    assert combinations([("a", ["1", "2"]), ("b", ["x", "y"])]) == [
        {"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "2", "b": "x"}, {"a": "2", "b": "y"}
    ]  # fmt: skip
    assert combinations([]) == [{}]


def test_every_point_is_measured_and_written(server, tmp_path, capsys):
    json_file, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    options = ["--base-url", server.url, "--num-prompts=8", "--ignore-eos"]
    options += ["--vary", "max-concurrency=1,2,8", f"--json={json_file}", f"--html={page}"]
    assert sweep(*options, "--goodput", "ttft:10000") == 0
    result = json.loads(json_file.read_text())
    points = result["points"]
    assert [point["values"] for point in points] == [
        {"max-concurrency": value} for value in ("1", "2", "8")
    ]
    assert [point["max_concurrent_requests"] for point in points] == [1, 2, 8]
    assert [point["settings"]["seed"] for point in points] == [0, 1, 2]
    assert {point["good_completed"] for point in points} == {8}
    # The fake engine is as fast for eight as for one.
    assert result["knees"] == [{"max-concurrency": "8"}]
    out = capsys.readouterr().out
    assert re.search(r"^8 .* 0  knee$", out, re.MULTILINE)
    assert re.search(r"^Highest goodput: .* at max-concurrency 8$", out, re.MULTILINE)
    assert page.read_text().count("<figure>") == 6


def test_point_without_success_is_reported_and_the_sweep_goes_on(server, capsys):
    options = ["--base-url", server.url, "--num-prompts=2"]
    # Token ids that the fake engine does not have.
    assert sweep(*options, "--vary", "vocab_size=100000,250") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "status 400: prompt must" in lines[1]
    assert sweep(*options, "--vary", "vocab-size=100000") == 1
    assert "no request succeeded at any point: status 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to vary; add --vary request-rate=1,2,4"),
        (["--vary=seed=1", "--vary=seed=2"], "seed is varied twice; give all its values at once"),
        (["--vary=no-such=1"], "--vary: unrecognized arguments: --no-such=1"),
        (["--vary=request-rate=1,0"], "--vary: argument --request-rate: '0' must be above 0"),
        (
            ["--vary=seed=1", "--base-url=http://x", "--serve-args="],
            "--base-url http://x names a running server, --serve-args and --vary-server start one",
        ),
    ],
)
def test_contradictions_are_one_line(capsys, options, message):
    assert sweep(*options) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_server_that_does_not_start_says_why():
    command = r"`paged serve no/such\.gguf --host 127\.0\.0\.1 --port \d+` ended \(1\): .*exist"
    with pytest.raises(UserError, match=command), started_server("no/such.gguf", [], 60):
        pass


def test_server_that_is_too_slow_is_stopped():
    with (
        pytest.raises(UserError, match=r"was not ready after 0 s"),
        started_server("no/such.gguf", [], 0),
    ):
        pass


def coordinates(svg: str) -> list[tuple[float, float]]:
    """Return the corners of the first line of a chart."""
    path = re.search(r'class="line c0" d="M([^"]*)"', svg)[1]
    return [tuple(map(float, corner.split())) for corner in path.split("L")]


def test_chart_is_in_proportion():
    points = [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)]
    corners = coordinates(Chart("t", "x", "y", [Series("s", points)]).svg())
    (x0, y0), (x1, y1), (x2, y2) = corners
    assert (x1 - x0, y1 - y0) == pytest.approx(((x2 - x0) / 2, (y2 - y0) / 2))
    assert x2 > x0
    assert y2 < y0


def test_logarithmic_chart_has_equal_steps_for_equal_ratios():
    points = [(1.0, 1.0), (4.0, 1.0), (16.0, 1.0)]
    corners = coordinates(Chart("t", "x", "y", [Series("s", points)], log_x=True).svg())
    (x0, _), (x1, _), (x2, _) = corners
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)


def test_chart_thins_many_points_and_says_when_there_are_none():
    many = [(float(x), math.sin(x)) for x in range(100_000)]
    corners = coordinates(Chart("t", "x", "y", [Series("s", many)]).svg())
    assert len(corners) < 1000
    assert "nothing was measured" in Chart("t", "x", "y", [Series("s", [])]).svg()


def test_distribution_is_the_share_at_most_as_large():
    assert distribution([3.0, 1.0, 2.0, 2.0]) == [
        (1.0, 0.0), (1.0, 25.0), (2.0, 50.0), (2.0, 75.0), (3.0, 100.0)
    ]  # fmt: skip
    assert distribution([]) == []


def test_legend_of_several_series_stands_beside_the_drawing_and_names_them_escaped():
    points = [(1.0, 1.0), (2.0, 2.0)]
    one = Chart("<t>", "x", "y", [Series("only", points), Series("empty", [])]).figure()
    assert "<figcaption>&lt;t&gt;</figcaption><svg" in one
    names = [f"<{index}>" for index in range(7)]
    several = Chart("t", "x", "y", [Series(name, points) for name in names]).figure()
    assert re.findall(r"</svg>([^<]*)</li>", several) == [f"&lt;{index}&gt;" for index in range(7)]
    # Five colours; then they come again, dashed, in the legend as in the drawing.
    drawing = several.partition("</ul>")[2]
    for part in (several.partition("</ul>")[0], drawing):
        classes = re.findall(r'<path class="(line [^"]*)"', part)
        assert classes == [*(f"line c{i}" for i in range(5)), "line c0 dashed", "line c1 dashed"]


def test_server_that_is_started_has_no_other_address(capsys):
    command = ["bench", "sweep", "--vary", "request-rate=1", "--serve-args", "m", "--port=1"]
    assert main(command) == 1
    assert "--host and --port name a running server" in capsys.readouterr().err
