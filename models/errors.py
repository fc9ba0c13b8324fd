"""Errors of the models floor: a checkpoint that is bad, and one that is not implemented."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or does not fit its config; one line says what to do."""


class UnsupportedModelError(ValueError):
    """The checkpoint is valid but needs something this engine does not implement."""
