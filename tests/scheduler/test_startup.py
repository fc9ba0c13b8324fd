"""`StartupPhases`: seconds of each phase, and the table in the log."""

import pytest

from paged.scheduler.startup import Phase, StartupPhases


def test_phases_are_recorded_in_order_and_shown_as_a_table():
    times = iter([10.0, 11.5, 12.0, 16.5])
    startup = StartupPhases(lambda: next(times))
    for name in ("load weights", "compile steps"):
        with startup.phase(name):
            pass
    assert startup.phases == (Phase("load weights", 10.0, 1.5), Phase("compile steps", 12.0, 4.5))
    assert startup.table().splitlines() == [
        "Ready in 6.0 s:",
        "  load weights       1.5 s   25%",
        "  compile steps      4.5 s   75%",
    ]


def test_a_phase_that_fails_is_not_recorded():
    startup = StartupPhases()
    with pytest.raises(OSError, match="gone"), startup.phase("open checkpoint"):
        raise OSError("gone")
    assert startup.phases == ()
    assert startup.table() == "Ready in 0.0 s:"
