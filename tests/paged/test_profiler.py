"""`StepProfiler`: one trace at a time, for as many steps as were asked for."""

import logging

import pytest

from paged.profiler import StepProfiler


def test_steps_are_counted(tmp_path):
    profiler = StepProfiler()
    profiler.on_step()
    profiler.start(str(tmp_path), num_steps=2)
    with pytest.raises(RuntimeError, match="already; stop it first"):
        profiler.start(str(tmp_path))
    profiler.on_step()
    assert profiler.is_running
    profiler.on_step()
    assert not profiler.is_running
    assert list(tmp_path.rglob("*.xplane.pb"))
    with pytest.raises(RuntimeError, match="No profile is being taken"):
        profiler.stop()


def test_a_trace_without_a_number_of_steps_goes_on_until_it_is_stopped(tmp_path):
    profiler = StepProfiler()
    profiler.start(str(tmp_path))
    for _ in range(5):
        profiler.on_step()
    assert profiler.is_running
    profiler.stop()


def test_a_profile_that_cannot_be_written_does_not_end_the_engine(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    profiler = StepProfiler()
    profiler.start(str(tmp_path / "file"), num_steps=1)
    with caplog.at_level(logging.ERROR):
        profiler.on_step()
    assert not profiler.is_running
    assert "could not be written" in caplog.text
    profiler.start(str(tmp_path / "other"), num_steps=1)
    profiler.on_step()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_no_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num_steps=0 must be at least 1"):
        StepProfiler().start(str(tmp_path), num_steps=0)
