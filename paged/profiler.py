"""`StepProfiler`: JAX's profiler around a number of steps."""

import logging
import shutil
import tempfile
import threading

import jax

logger = logging.getLogger(__name__)


class StepProfiler:
    """Starts and stops a trace of this process, which TensorBoard and XProf show.

    There is one such profiler in a process. Any thread may call it; stopping takes as long as the
    trace takes to be written.

    Attributes:
      is_running: whether a trace is being taken.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._steps_left: int | None = None
        self._directory = self._written = ""
        self._lock = threading.Lock()

    def start(self, directory: str, num_steps: int | None = None) -> None:
        """Start a trace.

        Args:
          directory: where it will be written, in a folder of its own.
          num_steps: after so many steps it ends; None: with `stop`.

        Raises:
          ValueError: `num_steps` is less than 1.
          RuntimeError: a trace is being taken already.
        """
        if num_steps is not None and num_steps < 1:
            raise ValueError(f"num_steps={num_steps} must be at least 1.")
        with self._lock:
            if self.is_running:
                raise RuntimeError("A profile is being taken already; stop it first.")
            options = jax.profiler.ProfileOptions()
            # Hooks around every Python call would show a host that is several times slower.
            options.python_tracer_level = 0
            # Written elsewhere first: JAX takes no other profile after one that it could not write.
            self._written = tempfile.mkdtemp(prefix="paged-profile-")
            jax.profiler.start_trace(self._written, profiler_options=options)
            self._directory, self._steps_left, self.is_running = directory, num_steps, True
        logger.info("Taking a profile of %s steps.", num_steps or "all")

    def stop(self) -> None:
        """Stop the trace and write it.

        Raises:
          RuntimeError: none is being taken.
          OSError: it cannot be written; the next one can be taken nevertheless.
        """
        with self._lock:
            if not self.is_running:
                raise RuntimeError("No profile is being taken; start one first.")
            self.is_running = False
            try:
                jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
                shutil.copytree(self._written, self._directory, dirs_exist_ok=True)
            finally:
                shutil.rmtree(self._written, ignore_errors=True)
        logger.info("Wrote a profile to %s.", self._directory)

    def on_step(self) -> None:
        """Count a step, and stop the trace if it was the last; what then fails is logged."""
        if not self.is_running or self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        try:
            self.stop()
        except Exception:  # a full disk must not end the engine
            logger.exception("The profile could not be written.")
