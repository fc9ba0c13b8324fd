"""`benchmarks/peers`: its arithmetic, its table, and its processes with engines that are fakes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers import run as run_module
from benchmarks.peers.competitors import CompetitorError, EngineProcess, Process
from benchmarks.peers.cpu_load import LoadMeter, busy_seconds, paused, process_seconds
from benchmarks.peers.folder import PeerFolder
from benchmarks.peers.install import InstallError, install
from benchmarks.peers.lineup import LineUp
from benchmarks.peers.protocol import Job, Outcome, decode_step_seconds
from benchmarks.peers.record import markdown_table, result_of, verdict
from benchmarks.peers.run import Comparison
from benchmarks.peers.servers import HttpServer, ServerStart
from benchmarks.peers.workloads import (
    WORKLOADS,
    Shape,
    Workload,
    context_growth,
    decode_rate,
    output_rate,
    seconds,
    total_rate,
    workloads_named,
)

ROOT = Path(__file__).parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


def workload(**changes) -> Workload:
    values = {
        "name": "two",
        "shapes": (Shape(2, 4, 3),),
        "ours": "paged",
        "peers": ("vllm", "transformers"),
        "figure": output_rate,
        "unit": "output tok/s",
        "must": 1.5,
        "goal": 2.0,
    }
    return Workload(**{**values, **changes})


def run(figure: float, first_tokens: tuple[int, ...] = (), foreign_cores: float = 0.0) -> dict:
    return {"figure": figure, "first_tokens": first_tokens, "foreign_cores": foreign_cores}


def test_figures_of_a_run():
    shapes = [Shape(2, 100, 10)]
    outcomes = [Outcome(4.0, [10, 10], decode_step_seconds=0.05)]
    assert output_rate(shapes, outcomes) == 5
    assert total_rate(shapes, outcomes) == 55
    assert seconds(shapes, outcomes) == 4
    assert decode_rate(shapes, outcomes) == 20
    with pytest.raises(ValueError, match="decode steps' time"):
        decode_rate(shapes, [Outcome(4.0, [10])])


def test_growth_is_one_where_a_step_costs_a_constant_and_its_context():
    shapes = [Shape(16, length, 48) for length in (256, 1024, 4096)]

    def growth(step_seconds) -> float:
        outcomes = [
            Outcome(1.0, [48] * 16, decode_step_seconds=step_seconds(shape.input_len))
            for shape in shapes
        ]
        return context_growth(shapes, outcomes)

    assert growth(lambda context: 0.03 + 1e-5 * context) == pytest.approx(1)
    # (4096^2 - 1024^2) / 3072 by (1024^2 - 256^2) / 768
    assert growth(lambda context: 1e-8 * context**2) == pytest.approx(4)


def test_decode_steps_are_those_that_decoded_for_all():
    # Two prompts: the second enters at 3, the first has ended after 6; steps 3-4, 4-5, 5-6 count.
    assert decode_step_seconds([[1.0, 3.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 6.0, 9.0]]) == 1
    assert decode_step_seconds([[1.0], [1.0]]) is None


def test_prompts_follow_from_the_seed():
    shape = Shape(3, 50, 7)
    job = shape.job("a", 1000)
    assert job == shape.job("a", 1000)
    assert job.prompts[0] != job.prompts[1] != shape.job("b", 1000).prompts[1]
    assert ([len(prompt) for prompt in job.prompts], job.output_len) == ([50] * 3, 7)
    assert all(300 <= token < 1000 for prompt in job.prompts for token in prompt)


def test_ratio_is_that_of_the_medians_whichever_way_is_better():
    runs = {"paged": [run(30), run(10), run(20)], "vllm": [run(5), run(10), run(50)]}
    higher = result_of(workload(), runs, {})["comparisons"]["vllm"]
    assert higher["ratio"] == 2
    assert higher["rounds"] == pytest.approx([6, 1, 0.4])
    lower = result_of(workload(is_lower_better=True), runs, {})["comparisons"]["vllm"]
    assert lower["ratio"] == 0.5
    assert lower["rounds"] == pytest.approx([1 / 6, 1, 2.5])


def test_agreement_is_the_share_of_prompts():
    runs = {
        "paged": [run(1, (7, 8)), run(1, (9, 3))],
        "vllm": [run(1, (7, 8)), run(1, (9, 4))],
        "transformers": [run(1), run(1)],
    }
    comparisons = result_of(workload(), runs, {})["comparisons"]
    assert comparisons["vllm"]["first_tokens_agree"] == 0.75
    assert comparisons["transformers"]["first_tokens_agree"] is None


@pytest.mark.parametrize(
    ("ours", "expected"), [(20, "goal"), (19.9, "must"), (15, "must"), (14.9, "missed")]
)
def test_verdict_on_a_ratio(ours, expected):
    runs = {"paged": [run(ours)], "vllm": [run(10)], "transformers": [run(1)]}
    result = result_of(workload(), runs, {})
    assert verdict(result, "vllm") == expected
    assert verdict(result, "transformers") == "-"  # the target is of the first peer


@pytest.mark.parametrize(("ours", "expected"), [(6, "goal"), (6.1, "must"), (15.1, "missed")])
@pytest.mark.parametrize("peers", [(), ("vllm-start",)])
def test_verdict_on_a_bounded_figure(ours, expected, peers):
    bounded = workload(is_lower_better=True, must=15, goal=6, bounds_figure=True, peers=peers)
    result = result_of(bounded, {"paged": [run(ours)], **{p: [run(60)] for p in peers}}, {})
    assert verdict(result, peers[0] if peers else None) == expected


def test_table_has_a_row_per_peer_and_says_what_is_missing():
    runs = {
        "paged": [run(123.4, (1, 2), 0.25), run(123.4, (1, 2), 0.5)],
        "vllm": [run(50, (1, 3), 0.75), run(40, (1, 2), 0.125)],
        "transformers": [],
    }
    result = result_of(workload(), runs, {"transformers": "not installed\nsecond line"})
    table = markdown_table([json.loads(json.dumps(result))])
    assert table.splitlines()[2:] == [
        "| two | output tok/s | 123 | vllm | 45 | 2.74 (2.47 to 3.08) | 1.5 | 2 | goal | 75% "
        "| 0.12 to 0.75 |",
        "| two | output tok/s | 123 | transformers | - | - | - | - | - | - | 0.25 to 0.50 |",
        "",
        "- two, transformers: not installed",
    ]


def test_table_of_a_figure_without_peers():
    bounded = workload(must=1.5, goal=1.2, bounds_figure=True, is_lower_better=True, peers=())
    row = markdown_table([result_of(bounded, {"paged": [run(1.3)]}, {})]).splitlines()[2]
    assert row == (
        "| two | output tok/s | 1.3 | - | - | - | at most 1.5 | at most 1.2 | must | - "
        "| 0.00 to 0.00 |"
    )


def test_workloads_are_chosen_by_name():
    assert workloads_named("all") == list(WORKLOADS)
    names = [chosen.name for chosen in workloads_named("ready,1x128/128")]
    assert names == ["1x128/128", "ready"]
    with pytest.raises(ValueError, match="no workload 2x2; there are 1x128/128"):
        workloads_named("2x2")


def stat(pid: int, session: int, times: tuple[int, int, int, int]) -> str:
    return f"{pid} (a) b) S 1 {pid} {session} 0 -1 0 0 0 0 0 {' '.join(map(str, times))} 20 0 1"


def test_cpu_time_of_the_machine_and_of_processes():
    # user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
    text = f"cpu  {TICKS} {2 * TICKS} {3 * TICKS} 99 99 {TICKS} {TICKS} {5 * TICKS} 7 7\ncpu0 1 2\n"
    assert busy_seconds(text) == (8, 5)
    stats = [
        stat(10, 10, (TICKS, TICKS, 50 * TICKS, 50 * TICKS)),  # in a session of ours
        stat(11, 99, (7 * TICKS, 7 * TICKS, 0, 0)),  # somebody else's
        stat(12, 1, (TICKS, 0, 2 * TICKS, TICKS)),  # we, and our children that have ended
    ]
    assert process_seconds(iter(stats), {10}, 12) == 2 + 4


def test_foreign_load_is_what_others_did():
    code = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as busy:
        try:
            used, began = cpu_seconds(busy.pid), time.monotonic()
            theirs, ours = LoadMeter(list), LoadMeter(lambda: [busy.pid])
            while cpu_seconds(busy.pid) < used + 0.6:
                time.sleep(0.05)
            foreign, ours_excluded = theirs.stop(), ours.stop()
            used, elapsed = cpu_seconds(busy.pid) - used, time.monotonic() - began
        finally:
            busy.kill()
    difference = foreign["foreign_cores"] - ours_excluded["foreign_cores"]
    assert difference == pytest.approx(used / elapsed, rel=0.4)


def cpu_seconds(pid: int) -> float:
    return process_seconds(iter([Path(f"/proc/{pid}/stat").read_text()]), {pid}, 0)


def test_processes_of_a_session_are_paused_and_go_on(tmp_path):
    counter = tmp_path / "counter"
    # A shell and a child of it: the whole session is meant.
    script = f"while true; do echo x >> {counter}; sleep 0.01; done & wait"
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    try:

        def grows() -> bool:
            before = counter.stat().st_size
            time.sleep(0.3)
            return counter.stat().st_size > before

        while not counter.exists():
            time.sleep(0.01)
        with paused({process.pid}):
            grows()  # what was on its way to the file
            assert not grows()
        assert any(grows() for _ in range(200))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


FAKE = """
import sys, time
from benchmarks.peers.protocol import Outcome, serve

class Fake:
    def run(self, job):
        print("noise on the standard output")
        if job.output_len == 13:
            raise ValueError("thirteen")
        if job.output_len == 99:
            time.sleep(600)
        if job.output_len == 7:
            sys.exit(1)
        return Outcome(0.5, [job.output_len] * len(job.prompts), [p[0] for p in job.prompts])

def load(settings):
    print("more noise")
    if settings.model == "broken":
        raise OSError("no such model")
    return Fake()

serve(load, "numpy")
"""


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(model: str = "fine", timeout: float = 300) -> EngineProcess:
        settings = {"model": model, "threads": 1, "max_model_len": 8}
        process = Process(
            [sys.executable, "-c", FAKE, json.dumps(settings)],
            cores=sorted(os.sched_getaffinity(0))[:1],
            environment={"PYTHONPATH": str(ROOT)},
            folder=ROOT,
            log=tmp_path / "logs" / "fake.log",
            piped=True,
        )
        processes.append(process)
        return EngineProcess(process, timeout=timeout)

    yield start
    for process in processes:
        process.kill()


def test_engine_process_answers_jobs(start, tmp_path):
    engine = start()
    assert engine.description["versions"].keys() == {"numpy"}
    assert len(os.sched_getaffinity(engine.sessions()[0])) == 1
    job = Job([[5, 6], [8]], 3)
    assert engine.run(job) == Outcome(0.5, [3, 3], [5, 8])
    with pytest.raises(CompetitorError, match="ValueError: thirteen"):
        engine.run(Job([[1]], 13))
    assert engine.run(job).output_lens == [3, 3]  # it goes on
    assert "noise" in (tmp_path / "logs" / "fake.log").read_text()


def test_engine_that_ends_or_hangs_is_an_error(start):
    with pytest.raises(CompetitorError, match="gave no answer; the end of"):
        start().run(Job([[1]], 7))
    with pytest.raises(CompetitorError, match="gave no answer"):
        start(timeout=5).run(Job([[1]], 99))
    with pytest.raises(CompetitorError, match="OSError: no such model"):
        start("broken")


@pytest.fixture
def start_server(tmp_path):
    processes = []

    def start(port: int) -> Process:
        arguments = ["-m", "tests.server.serve_fake", "1", "a " * 50, str(port)]
        process = Process(
            [sys.executable, *arguments],
            cores=sorted(os.sched_getaffinity(0)),
            environment={},
            folder=ROOT,
            log=tmp_path / "server.log",
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


def test_server_is_driven_and_counts_its_tokens(start_server):
    server = HttpServer(start_server, timeout=300)
    try:
        outcome = server.run(Job([[1, 2, 3], [4, 5, 6]], 8))
        assert outcome.output_lens == [8, 8]
        assert outcome.seconds > 0.08  # the fake pauses 10 ms before each token
        with pytest.raises(CompetitorError, match="1 requests failed: status 400"):
            server.run(Job([[1] * 100_001], 8))
    finally:
        server.close()
    assert server._process.child.returncode == 0  # it was asked to stop, and did


def test_start_of_a_server_is_timed_and_the_server_stopped(start_server):
    starts = ServerStart(start_server, timeout=300)
    before = time.perf_counter()
    outcome = starts.run(Job([[1]], 1))
    assert 0.1 < outcome.seconds < time.perf_counter() - before
    assert starts._process.child.returncode is not None


def test_server_that_does_not_come_up_is_an_error(tmp_path):
    def start(port: int) -> Process:
        return Process(
            [sys.executable, "-c", "print('no model'); raise SystemExit(3)"],
            cores=sorted(os.sched_getaffinity(0)),
            environment={},
            folder=ROOT,
            log=tmp_path / "server.log",
        )

    with pytest.raises(CompetitorError, match=r"did not come up: it ended with 3.*\nno model"):
        HttpServer(start, timeout=300)


class FakeLineUp(LineUp):
    """Starts nothing: competitors answer from a table of seconds per run."""

    def missing(self, name):
        return "not installed" if name == "transformers" else None

    def start(self, name):
        return FakeCompetitor(name)


class FakeCompetitor:
    calls: list[tuple[str, list[int]]]
    description: dict

    def __init__(self, name: str) -> None:
        self.name = name
        self.description = {"versions": {name: "1"}}

    def run(self, job: Job) -> Outcome:
        FakeCompetitor.calls.append((self.name, job.prompts[0]))
        length = 2 if self.name == "short" else job.output_len
        return Outcome(2.0 if self.name == "vllm" else 1.0, [length] * len(job.prompts))

    def sessions(self) -> list[int]:
        return []

    def close(self) -> None:
        FakeCompetitor.calls.append((self.name, []))


@pytest.fixture
def lineup(tmp_path) -> FakeLineUp:
    FakeCompetitor.calls = []
    return FakeLineUp(PeerFolder(tmp_path), tmp_path / "model.gguf", [0], 1.0)


class NoBar:
    def set_description(self, text: str) -> None: ...
    def update(self) -> None: ...


def compare(lineup: LineUp, *workloads: Workload, peers=("vllm", "transformers")) -> Comparison:
    return Comparison(lineup, workloads, peers=peers, rounds=2, vocab_size=1000)


def test_competitors_take_turns_with_the_same_prompts(lineup):
    comparison = compare(lineup, workload())
    result = comparison.measure(0, NoBar())
    assert comparison.num_runs() == 9
    names = [name for name, prompt in FakeCompetitor.calls if prompt]
    assert names == ["paged", "vllm"] * 3
    prompts = [prompt for _, prompt in FakeCompetitor.calls if prompt]
    assert prompts[0::2] == prompts[1::2]
    assert len({tuple(prompt) for prompt in prompts}) == 3  # new ones in every round
    assert len(result["runs"]["paged"]) == 2  # the warm-up does not count
    assert result["comparisons"]["vllm"]["ratio"] == 2
    assert result["errors"] == {"transformers": "not installed"}


def test_competitors_stay_until_nobody_needs_them(lineup):
    comparison = compare(lineup, workload(), workload(peers=()), peers=["vllm"])
    comparison.measure(0, NoBar())
    assert [name for name, prompt in FakeCompetitor.calls if not prompt] == ["vllm"]
    comparison.measure(1, NoBar())
    assert [name for name, prompt in FakeCompetitor.calls if not prompt] == ["vllm", "paged"]


def test_too_few_tokens_are_an_error(lineup):
    result = compare(lineup, workload(ours="short"), peers=["vllm"]).measure(0, NoBar())
    assert result["errors"]["short"] == "generated [2, 2] tokens instead of 3 each"
    assert result["comparisons"] == {}


def test_line_up_says_what_is_not_installed(tmp_path):
    real = LineUp(PeerFolder(tmp_path), tmp_path / "model.gguf", [0], 1.0)
    assert real.missing("paged") is None
    for name in ("vllm", "vllm-server", "transformers", "llama.cpp"):
        assert "run python -m benchmarks.peers.install --dir" in real.missing(name)


def test_failed_step_of_the_installation_does_not_stop_the_others():
    done = []

    def fail() -> None:
        raise InstallError("no compiler")

    assert install({"a": fail, "b": lambda: done.append("b")}) == {"a": "no compiler"}
    assert done == ["b"]


def test_table_of_a_record_is_printed_again(tmp_path, monkeypatch, capsys):
    result = result_of(workload(), {"paged": [run(10)], "vllm": [run(4)]}, {})
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"results": [result]}))
    monkeypatch.setattr(sys, "argv", ["run", "--table", str(file)])
    run_module.main()
    assert capsys.readouterr().out.strip() == markdown_table([result])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--threads", "0"], "--threads 0 must be from 1 to"),
        (["--peers", "sglang"], "no peer sglang; there are vllm"),
        (["--workloads", "2x2"], "no workload 2x2"),
        (["--json", "/nowhere/record.json"], "cannot write /nowhere/record.json"),
    ],
)
def test_mistakes_on_the_command_line_are_explained(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", *options])
    with pytest.raises(SystemExit):
        run_module.parse_arguments()
    assert message in capsys.readouterr().err
