"""Errors of the models floor that are not about an architecture."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or does not fit its config; one line says what to do."""
