"""The README says which models are supported, as the registry and the goldens do."""

from paged.models.config import SUPPORTED_ARCHITECTURES
from tests.models.model_table import BEGIN, END, README, golden_names, with_table


def test_the_table_is_current() -> None:
    text = README.read_text()
    assert BEGIN in text
    assert END in text
    assert text == with_table(text), "run: python -m tests.models.model_table"


def test_every_architecture_has_a_golden() -> None:
    assert not set(SUPPORTED_ARCHITECTURES) - set(golden_names())
