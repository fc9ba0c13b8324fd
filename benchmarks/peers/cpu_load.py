"""CPU time of this machine, and of some processes on it: what the others took is the difference.

Sources: proc(5), `/proc/stat` and `/proc/PID/stat`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")


def busy_seconds(stat: str) -> tuple[float, float]:
    """Return the seconds that all cores were busy, and those that the hypervisor took from them.

    Args:
      stat: content of `/proc/stat`.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split()[1:9])
    return (user + nice + system + irq + softirq) * _TICK, steal * _TICK


def process_seconds(stats: Iterator[str], sessions: Collection[int], pid: int) -> float:
    """Return the CPU seconds of some sessions' processes, and of one process and its past children.

    Args:
      stats: contents of `/proc/PID/stat`.
      sessions: session ids.
      pid: the process.
    """
    total = 0
    for stat in stats:
        number, _, rest = stat.partition(" (")
        # The name may hold spaces and brackets; what follows the last bracket is numbers.
        fields = rest.rpartition(") ")[2].split()
        user, system, children_user, children_system = map(int, fields[11:15])
        if int(number) == pid:
            total += user + system + children_user + children_system
        elif int(fields[3]) in sessions:
            total += user + system
    return total * _TICK


def _process_stats() -> Iterator[str]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                yield (folder / "stat").read_text()
            except OSError:
                continue  # it has ended


@contextlib.contextmanager
def paused(sessions: Collection[int]) -> Iterator[None]:
    """Stop all processes of some sessions for as long as the context lasts.

    An idle engine is not always idle: threads of OpenMP spin for a while after their work, and some
    engines poll.
    """

    def send(number: signal.Signals) -> None:
        for stat in list(_process_stats()):
            pid, _, rest = stat.partition(" (")
            if int(rest.rpartition(") ")[2].split()[3]) in sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


class LoadMeter:
    """Measures how many cores others kept busy while some processes worked.

    Args:
      sessions: returns the session ids of our processes; this process is ours as well.
    """

    def __init__(self, sessions: Callable[[], Collection[int]]) -> None:
        self._sessions = sessions
        self._start = time.perf_counter()
        self._before = self._read()

    def _read(self) -> tuple[float, float]:
        busy, steal = busy_seconds(Path("/proc/stat").read_text())
        return busy - process_seconds(_process_stats(), self._sessions(), os.getpid()), steal

    def stop(self) -> dict[str, float]:
        """Return `foreign_cores` and `stolen_cores`, means since the start."""
        foreign, stolen = (
            now - before for now, before in zip(self._read(), self._before, strict=True)
        )
        seconds = time.perf_counter() - self._start
        return {
            # Ticks are coarse.
            "foreign_cores": max(0.0, foreign / seconds),
            "stolen_cores": stolen / seconds,
        }
