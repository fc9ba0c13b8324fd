"""Errors of the models floor: a checkpoint that is bad, and one that is not implemented."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or does not fit its config; one line says what to do."""


class UnsupportedModelError(ValueError):
    """The checkpoint is valid but needs something this engine does not implement."""


class AdapterError(ValueError):
    """A LoRA adapter cannot be used; the subclasses say why, the message what to do about it."""


class AdapterNotFoundError(AdapterError):
    """There are no files of an adapter where they should be, or they are damaged."""


class AdapterMismatchError(AdapterError):
    """The files are an adapter of another model."""


class UnsupportedAdapterError(AdapterError):
    """The adapter is valid but needs something this engine does not implement, or not as set up."""
