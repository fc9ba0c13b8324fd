"""Several policies and capacities at once, as results, CSV and figures."""

import csv
import importlib

import pytest

from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.document_traces import cyclic
from paged.scheduler.simulator.plots import plot_results
from paged.scheduler.simulator.sweep import sweep, write_csv

CONFIG = SimulationConfig(200, policy="lru", concurrency=1)
TRACE = cyclic(documents=4, document_tokens=1000, passes=3)


def test_every_policy_runs_at_every_capacity():
    results = sweep(TRACE, CONFIG, policies=["lru", "optimal"], num_blocks=[100, 250])
    assert [(result.num_blocks, result.policy) for result in results] == [
        (100, "lru"), (100, "optimal"), (250, "lru"), (250, "optimal"),
    ]  # fmt: skip
    hits = [result.hit_tokens for result in results]
    # 4 documents of 62 blocks: all fit into 249 usable ones. Of 99 a request needs 63, so 36 can be
    # carried past it. A hit is carried past the three requests between two uses, of the ten that
    # have one before and one after them: three times 36 blocks at most. LRU carries nothing.
    assert hits[0] == 0
    assert hits[1] == 3 * 36 * 16
    assert hits[2] == hits[3] == 2 * 4 * 62 * 16


def test_nothing_listed_is_the_configuration_itself():
    (result,) = sweep(TRACE, CONFIG)
    assert (result.num_blocks, result.policy) == (200, "lru")


def test_unknown_policy_is_refused_before_the_first_run():
    def never():
        raise AssertionError("the trace was read")

    trace = cyclic()
    trace._generate = never
    with pytest.raises(ValueError, match="policy 'fifo' is unknown"):
        sweep(trace, CONFIG, policies=["lru", "fifo"])


def test_csv_has_a_line_per_run(tmp_path):
    results = sweep(TRACE, CONFIG, policies=["lru", "mru"])
    write_csv(results, tmp_path / "runs.csv")
    with open(tmp_path / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["lru", "mru"]
    assert [int(row["hit_tokens"]) for row in rows] == [result.hit_tokens for result in results]
    assert rows[0]["hit_tokens_2"] == str(results[0].passes[2].hit_tokens)
    assert float(rows[0]["ttft_p50"]) == results[0].latency("ttft").p50


def test_missing_matplotlib_is_explained(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"install the extra `plot`: pip install 'paged\[plot\]'"):
        plot_results(sweep(TRACE, CONFIG))


def test_figure_of_nothing_is_refused():
    with pytest.raises(ValueError, match="there are no results to plot"):
        plot_results([])


@pytest.mark.notebooks  # run with the tests that have matplotlib
@pytest.mark.parametrize("num_blocks", [[100], [100, 150, 250]], ids=["bars", "lines"])
def test_figure_shows_hit_rates_occupancy_and_latency(tmp_path, num_blocks: list[int]):
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    results = sweep(TRACE, CONFIG, policies=["lru", "mru"], num_blocks=num_blocks)
    figure = plot_results(results)
    hits, occupancy, latency = figure.axes
    if len(num_blocks) > 1:
        lines = {line.get_label(): line.get_xydata().tolist() for line in hits.get_lines()}
        assert lines["mru"] == [
            [result.num_blocks, 100 * result.hit_rate]
            for result in results
            if result.policy == "mru"
        ]
    else:
        assert [bar.get_height() for bar in hits.patches] == [100 * r.hit_rate for r in results]
    for axes in (occupancy, latency):
        labels = [line.get_label() for line in axes.get_lines()]
        assert labels == ["lru, 100 blocks", "mru, 100 blocks"]
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
