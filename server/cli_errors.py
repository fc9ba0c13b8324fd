"""`UserError`: what ends a command with one line instead of a traceback."""

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)


class UserError(Exception):
    """An error that its one-line message explains; no traceback is shown."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn the errors that a user can cause into `UserError`.

    Missing or unsupported models, contradicting settings, too little memory and the like are
    `ValueError`, `NotImplementedError` or `OSError` on the floors below.
    """
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        logger.debug("The error in full:", exc_info=True)
        raise UserError(" ".join(str(error).split()) or type(error).__name__) from error
