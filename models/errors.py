"""`CheckpointError`: what is raised when a checkpoint cannot be found, fetched or read."""


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete or damaged; the message is one line with a remedy."""
