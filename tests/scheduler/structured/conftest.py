"""One compiler for all tests that can share it."""

from collections.abc import Iterator

import pytest

from paged.scheduler.structured.compiler import GrammarCompiler
from tests.scheduler.structured.grammars import make_compiler


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    made = make_compiler()
    yield made
    made.close()
