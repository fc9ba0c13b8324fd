"""Keeps what one test does to logging from the next."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("paged")
    before = (list(root.handlers), root.level, own.level)
    yield
    root.handlers[:], root_level, own_level = before
    root.setLevel(root_level)
    own.setLevel(own_level)
