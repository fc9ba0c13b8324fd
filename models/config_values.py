"""Values out of a model's configuration, each of the type that it must have."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from paged.models.errors import CheckpointError


def required(config: Mapping[str, Any], key: str) -> Any:
    """Return a value; raises `CheckpointError` if it is absent or null."""
    value = config.get(key)
    if value is None:
        raise CheckpointError(
            f"the model's config has no {key!r}; check that the checkpoint is complete."
        )
    return value


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer of at least 1, or `default` for an absent or null one.

    Raises:
      CheckpointError: if it is something else, or absent without a default.
    """
    value = config.get(key) if default is not None else required(config, key)
    if value is None:
        assert default is not None
        return default
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise CheckpointError(f"{key}={value!r} of the model's config must be a positive integer.")
    return int(value)


def natural_int(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return an integer of at least 0, or `default` for an absent or null one.

    Raises:
      CheckpointError: if it is something else.
    """
    return 0 if config.get(key) == 0 else positive_int(config, key, default=default)


def positive_float(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number above 0, or `default` for an absent or null one.

    Raises:
      CheckpointError: if it is something else, or absent without a default.
    """
    value = config.get(key) if default is not None else required(config, key)
    if value is None:
        assert default is not None
        return default
    return _positive(value, key)


def optional_float(config: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number above 0, or None if it is absent, null or 0."""
    return positive_float(config, key) if config.get(key) else None


def positive_floats(config: Mapping[str, Any], key: str, length: int) -> tuple[float, ...]:
    """Return a list of `length` finite numbers above 0; raises `CheckpointError` otherwise."""
    values = required(config, key)
    if not isinstance(values, list | tuple) or len(values) != length:
        raise CheckpointError(
            f"{key} of the model's config must be a list of {length} numbers, one for each pair "
            "of features that is rotated."
        )
    return tuple(_positive(value, f"{key}[{i}]") for i, value in enumerate(values))


def _positive(value: Any, name: str) -> float:
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if not is_number or not 0 < value < math.inf:
        raise CheckpointError(f"{name}={value!r} of the model's config must be a positive number.")
    return float(value)
