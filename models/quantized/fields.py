"""Fields of a `quantization_config`, and what is said about those that are not implemented."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paged.models.errors import UnsupportedModelError


def require[T](
    fields: Mapping[str, Any],
    name: str,
    supported: Sequence[T],
    *,
    default: T | None = None,
    names: Sequence[str] = (),
    lower: bool = False,
) -> T:
    """Return a field's value, which must be one of `supported`.

    Args:
      fields: the config, or a part of it.
      name: of the field.
      supported: values that are implemented.
      default: what counts if the field is missing or null.
      names: other spellings of the field.
      lower: the case does not matter.

    Raises:
      UnsupportedModelError: if it is another value.
    """
    found = [fields[key] for key in (names or (name,)) if fields.get(key) is not None]
    value = found[0] if found else default
    value = value.lower() if lower and isinstance(value, str) else value
    for choice in supported:
        if value == choice and type(value) is type(choice):
            return choice
    listed = ", ".join(map(repr, supported))
    raise UnsupportedModelError(f"{name}={value!r} is not implemented; supported: {listed}")


def flag_of(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a field that is true or false."""
    return require(fields, name, (True, False), default=default)


def refuse_filled(fields: Mapping[str, Any], name: str, meaning: str) -> None:
    """Raise `UnsupportedModelError` unless a field is missing, null, false or empty."""
    if fields.get(name):
        raise UnsupportedModelError(f"{name}={fields[name]!r} ({meaning}) is not implemented")


def group_size_of(
    fields: Mapping[str, Any], *, names: Sequence[str] = ("group_size",)
) -> int | None:
    """Return the inputs that share a scale, None for all of them, which configs say by -1.

    Raises:
      UnsupportedModelError: if it is no number, or none that can be.
    """
    value = next((fields[name] for name in names if fields.get(name) is not None), -1)
    if isinstance(value, bool) or not isinstance(value, int) or (value != -1 and value < 2):
        raise UnsupportedModelError(
            f"group_size={value!r} cannot be; it is a number of inputs of at least 2, or -1 for all"
        )
    return None if value == -1 else value


def block_size_of(fields: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale.

    Raises:
      UnsupportedModelError: if they are no two numbers.
    """
    value = fields.get(name)
    sizes = tuple(value) if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedModelError(
            f"{name}={value!r} cannot be; it is a number of outputs and a number of inputs"
        )
    return sizes


def names_of(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a field that lists names; missing or null is none of them.

    Raises:
      UnsupportedModelError: if it is no list of names.
    """
    values = fields.get(name) or ()
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise UnsupportedModelError(f"{name}={values!r} is no list of names")
    return tuple(values)


def substring_patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Return regular expressions for modules in whose names these occur."""
    return tuple(f".*{re.escape(name)}" for name in names)


def module_patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Return regular expressions for modules by compressed-tensors' rules: `re:...` or a name."""
    return tuple(name[3:] if name.startswith("re:") else f"{re.escape(name)}$" for name in names)
