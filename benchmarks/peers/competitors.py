"""Competitors: each is started once and then does one job at a time, so that they can take turns.

Here are the engines, in processes of their own; `benchmarks.peers.servers` has those behind HTTP.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.protocol import Job, Outcome, Settings

_LOG_LINES = 15


class CompetitorError(Exception):
    """An engine could not be started or failed; the message says how, and where its log is."""


class Competitor(Protocol):
    """Something that does jobs.

    Attributes:
      description: versions and load time.
    """

    description: dict[str, Any]

    def run(self, job: Job) -> Outcome:
        """Do one job. Raises: CompetitorError."""
        ...

    def sessions(self) -> list[int]:
        """Return the session ids of its processes, whose CPU time is its own."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class Process:
    """A child in a session of its own, kept to some cores, with its output in a log.

    Args:
      command: what to start.
      cores: that it may run on.
      environment: variables beside those of this process.
      folder: working directory.
      log: file for its standard error; its standard output too unless it is piped.
      piped: whether its standard input and output are for us.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cores: Sequence[int],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        piped: bool = False,
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            self.child = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else file,
                stderr=file,
                text=True,
                cwd=folder,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        # Before it has made any threads: they inherit it.
        os.sched_setaffinity(self.child.pid, cores)

    def error(self, what: str) -> CompetitorError:
        """Return an error that says what happened, with the end of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return CompetitorError("\n".join([f"{what}; the end of {self._log}:", *lines]))

    def kill_group(self) -> None:
        """Kill the child and everything that it started; safe from another thread."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the child and everything that it started, and let go of it."""
        self.kill_group()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()

    def terminate(self, seconds: float) -> None:
        """Ask the child to end, and end it if it does not."""
        self.child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(seconds)
        self.kill()


class EngineProcess:
    """An engine that speaks `benchmarks.peers.protocol`.

    Args:
      process: started with pipes; it has the settings already.
      timeout: seconds for loading, and for each job.

    Raises: CompetitorError if it does not come up.
    """

    def __init__(self, process: Process, *, timeout: float) -> None:
        self._process = process
        self._timeout = timeout
        try:
            self.description: dict[str, Any] = self._answer()["ready"]
        except BaseException:
            process.kill()
            raise

    def run(self, job: Job) -> Outcome:
        stdin = self._process.child.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(asdict(job)) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._process.error("the engine is gone") from None
        return Outcome(**self._answer())

    def sessions(self) -> list[int]:
        return [self._process.child.pid]

    def close(self) -> None:
        self._process.kill()

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.child.stdout
        assert stdout is not None
        # A pipe cannot be read with a time limit; that of a killed process ends.
        timer = threading.Timer(self._timeout, self._process.kill_group)
        timer.start()
        line = stdout.readline()
        timer.cancel()
        if not line:
            raise self._process.error("the engine gave no answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._process.error(answer["error"])
        return answer


def engine_arguments(module: str, settings: Settings) -> list[str]:
    """Return an interpreter's arguments that start an adapter."""
    return ["-m", f"benchmarks.peers.{module}", json.dumps(asdict(settings))]
