"""Errors that cross from the engine to its callers."""


class QueueFullError(RuntimeError):
    """The engine already holds as many waiting requests as it may; try again later."""


class SlowConsumerError(RuntimeError):
    """A consumer was too far behind the engine, so its request was ended."""


class EngineDeadError(RuntimeError):
    """The step loop has died or is shut down; no request can be served any more."""


class CapacityError(ValueError):
    """The device's memory cannot hold what the settings ask for; the message says what to turn."""
