"""Measures this engine beside its peers, taking turns, and prints the table.

    python -m benchmarks.peers.install
    python -m benchmarks.peers.run --workloads all --rounds 5 --json peers.json
    python -m benchmarks.peers.run --table peers.json

Every competitor is loaded once and gets the same random token ids, the same cores and the same
number of tokens to generate, past the end of a text; one computes at a time. A round is one run of
each; the first round of a workload is a warm-up that does not count. docs/benchmarking.md says how
to read the table.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.peers.competitors import Competitor, CompetitorError
from benchmarks.peers.cpu_load import LoadMeter, paused
from benchmarks.peers.folder import DEFAULT_FOLDER, PeerFolder
from benchmarks.peers.lineup import PEERS, LineUp, peer_of
from benchmarks.peers.record import markdown_table, result_of
from benchmarks.peers.workloads import Workload, workloads_named
from paged.models.demo import fetch_demo_model
from paged.models.gguf_config import gguf_hf_config
from paged.models.gguf_file import GGUFFile
from paged.server.bench_report import check_writable, versions
from paged.server.cli_errors import UserError


class Comparison:
    """Runs workloads; competitors stay loaded until no later workload needs them.

    Args:
      lineup: starts the competitors.
      workloads: in the order in which they are run.
      peers: who takes part beside us.
      rounds: counted runs of each competitor.
      vocab_size: prompts hold ids below it.
    """

    def __init__(
        self,
        lineup: LineUp,
        workloads: Sequence[Workload],
        *,
        peers: Sequence[str],
        rounds: int,
        vocab_size: int,
    ) -> None:
        self._lineup = lineup
        self._workloads = workloads
        self._peers = peers
        self._rounds = rounds
        self._vocab_size = vocab_size
        self._running: dict[str, Competitor] = {}
        self._broken: dict[str, str] = {}
        self.descriptions: dict[str, dict[str, Any]] = {}

    def names(self, workload: Workload) -> list[str]:
        """Return who is to take part in a workload, we first."""
        return [workload.ours, *(p for p in workload.peers if peer_of(p) in self._peers)]

    def num_runs(self) -> int:
        """Return the number of runs, warm-ups included."""
        return sum(len(self.names(w)) for w in self._workloads) * (self._rounds + 1)

    def measure(self, index: int, bar: Any) -> dict[str, Any]:
        """Return the record of one workload; what fails is in it."""
        workload = self._workloads[index]
        names = self.names(workload)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        errors: dict[str, str] = {}
        for round_number in range(self._rounds + 1):
            for name in names:
                bar.set_description(f"{workload.name}: {name}")
                if name not in errors:
                    try:
                        run = self._run(workload, name, round_number)
                    except CompetitorError as error:
                        errors[name] = str(error)
                        tqdm.write(f"{workload.name}, {name}: {error}", file=sys.stderr)
                    else:
                        if round_number:
                            runs[name].append(run)
                bar.update()
        self._close_all_but(needed=self._workloads[index + 1 :])
        return result_of(workload, runs, errors)

    def close(self) -> None:
        """End all competitors."""
        self._close_all_but(needed=())

    def _run(self, workload: Workload, name: str, round_number: int) -> dict[str, Any]:
        """Do one run and return its figure, its outcomes and the others' load during it."""
        competitor = self._competitor(name)
        # New prompts every time: a prefix cache has nothing to give.
        jobs = [
            shape.job(f"{workload.name} {round_number}", self._vocab_size)
            for shape in workload.shapes
        ]
        others = [c.sessions() for other, c in self._running.items() if other != name]
        with paused({session for sessions in others for session in sessions}):
            meter = LoadMeter(competitor.sessions)
            try:
                outcomes = [competitor.run(job) for job in jobs]
            except CompetitorError:
                self._running.pop(name).close()
                raise
            load = meter.stop()
        for shape, outcome in zip(workload.shapes, outcomes, strict=True):
            if outcome.output_lens != [shape.output_len] * shape.num_prompts:
                raise CompetitorError(
                    f"generated {outcome.output_lens} tokens instead of {shape.output_len} each"
                )
        return {
            "figure": workload.figure(workload.shapes, outcomes),
            "seconds": [outcome.seconds for outcome in outcomes],
            "decode_step_seconds": [outcome.decode_step_seconds for outcome in outcomes],
            "first_tokens": [token for outcome in outcomes for token in outcome.first_tokens],
            **load,
        }

    def _competitor(self, name: str) -> Competitor:
        """Return the competitor, started if it is not running. Raises: CompetitorError."""
        if name not in self._running:
            if name not in self._broken and (missing := self._lineup.missing(name)):
                self._broken[name] = missing
            if name in self._broken:
                raise CompetitorError(self._broken[name])
            try:
                self._running[name] = self._lineup.start(name)
            except CompetitorError as error:
                self._broken[name] = str(error)
                raise
            self.descriptions[name] = self._running[name].description
        return self._running[name]

    def _close_all_but(self, needed: Sequence[Workload]) -> None:
        keep = {name for workload in needed for name in self.names(workload)}
        for name in list(self._running):
            if name not in keep:
                self._running.pop(name).close()


def machine() -> dict[str, Any]:
    """Return what the figures depend on and a reader cannot see."""
    cpu = Path("/proc/cpuinfo").read_text()
    models = {line.partition(":")[2].strip() for line in cpu.splitlines() if "model name" in line}
    return {
        "cpu": sorted(models),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="all", help="names with commas")
    parser.add_argument("--peers", default=",".join(PEERS), help="names with commas, or none")
    parser.add_argument("--rounds", type=int, default=5, help="counted runs of each side")
    parser.add_argument("--threads", type=int, help="cores for each (default: all)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a load or a job")
    parser.add_argument("--dir", type=Path, default=DEFAULT_FOLDER, help="of the peers")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--table", type=Path, help="print the table of a record, measure nothing")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1.")
    available = sorted(os.sched_getaffinity(0))
    args.threads = len(available) if args.threads is None else args.threads
    if not 1 <= args.threads <= len(available):
        parser.error(f"--threads {args.threads} must be from 1 to {len(available)}.")
    args.cores = available[: args.threads]
    args.peers = [] if args.peers == "none" else args.peers.split(",")
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}.")
    try:
        args.workloads = workloads_named(args.workloads)
        check_writable(args.json)
    except (ValueError, UserError) as error:
        parser.error(str(error))
    return args


def record_of(
    args: argparse.Namespace, comparison: Comparison, results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": args.threads,
        "rounds": args.rounds,
        "versions": versions(),
        "competitors": comparison.descriptions,
        "results": list(results),
    }


def main() -> None:
    args = parse_arguments()
    if args.table:
        print(markdown_table(json.loads(args.table.read_text())["results"]))
        return
    # As Ctrl-C does: an end in order, or servers and engines would stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    gguf = fetch_demo_model()
    lineup = LineUp(PeerFolder(args.dir.expanduser()), gguf, args.cores, args.timeout)
    comparison = Comparison(
        lineup,
        args.workloads,
        peers=args.peers,
        rounds=args.rounds,
        vocab_size=gguf_hf_config(GGUFFile(gguf))["vocab_size"],
    )
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.callback(comparison.close)
        bar = stack.enter_context(tqdm(total=comparison.num_runs(), unit="run"))
        for index in range(len(args.workloads)):
            results.append(comparison.measure(index, bar))
            if args.json:  # after each one: an interruption loses little
                text = json.dumps(record_of(args, comparison, results), indent=1)
                args.json.write_text(text + "\n")
    print(markdown_table(results))


if __name__ == "__main__":
    main()
