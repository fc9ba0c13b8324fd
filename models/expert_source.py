"""Tensors of experts as the model has them: stacks of what a checkpoint stores one by one or mixed.

A stack is put together when it is read, from views of the files, so loading takes the memory of one
stack beyond the weights themselves.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from paged.models.errors import CheckpointError
from paged.models.tensor_source import TensorSource

_MEMBER = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_GPT_OSS = re.compile(r".*\.mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales|)")


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor that is not in the file as it is wanted."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class _Arranged:
    """A source some of whose tensors are replaced by others, made of them.

    Those that are replaced are not listed any more, but can still be read.
    """

    def __init__(self, source: TensorSource, views: dict[str, _View], hidden: set[str]) -> None:
        self._source, self._views, self._hidden = source, views, hidden

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        kept = [name for name in self._source.names() if name not in self._hidden]
        return [*kept, *self._views]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        view = self._views.get(name)
        return self._source.shape(name) if view is None else view.shape

    def read(self, name: str) -> np.ndarray:
        """Return one tensor."""
        view = self._views.get(name)
        return self._source.read(name) if view is None else view.read()

    def close(self) -> None:
        """Let go of the files."""
        self._views.clear()
        self._source.close()


def stack_experts(source: TensorSource) -> TensorSource:
    """Return a source in which the tensors `X.experts.N.Y` of all N are one, `X.experts.Y`.

    Raises:
      CheckpointError: if numbers are missing between 0 and the largest of the stack, or if shapes
        differ within one; it lists the tensors.
    """
    stacks: dict[str, dict[int, str]] = {}
    for name in source.names():
        if match := _MEMBER.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
    problems = [problem for members in stacks.values() for problem in _problems(source, members)]
    if problems:
        raise CheckpointError(
            f"the checkpoint's tensors of experts do not fit each other; {', '.join(problems)}. "
            "Fetch the checkpoint again."
        )
    views = {
        stack: _stack(source, [members[i] for i in sorted(members)])
        for stack, members in stacks.items()
    }
    return _Arranged(
        source, views, {name for members in stacks.values() for name in members.values()}
    )


def _problems(source: TensorSource, members: dict[int, str]) -> Iterator[str]:
    some = max(members)
    expected = source.shape(members[some])
    for expert in range(some):
        name = members.get(expert)
        if name is None:
            other = members[some].replace(f".experts.{some}.", f".experts.{expert}.")
            yield f"missing: {other}"
        elif (actual := source.shape(name)) != expected:
            yield f"of another shape: {name} {list(actual)} instead of {list(expected)}"


def _stack(source: TensorSource, names: list[str]) -> _View:
    def read() -> np.ndarray:
        first = source.read(names[0])
        stack = np.empty((len(names), *first.shape), first.dtype)
        for place, name in zip(stack, names, strict=True):
            place[...] = source.read(name)
        return stack

    return _View((len(names), *source.shape(names[0])), read)


def arrange_gpt_oss(source: TensorSource) -> TensorSource:
    """Return a source in which gpt-oss' experts have outputs before inputs, and gates apart.

    Its `gate_up_proj` alternates outputs of gate and up; they become `gate_up_proj:gate` and
    `gate_up_proj:up`, with the ending `_bias`, `_blocks` or `_scales` that the tensor has.
    `down_proj` becomes `down_proj:down`. Weights that are no blocks have inputs before outputs
    there. A source that has these tensors under these names already, as GGUF's, stays as it is.
    """
    views: dict[str, _View] = {}
    hidden = set()
    for name in source.names():
        match = _GPT_OSS.fullmatch(name)
        if match is None:
            continue
        hidden.add(name)
        is_transposed = not match[2]
        if match[1] == "down_proj":
            views[f"{name}:down"] = _part(source, name, is_transposed, slice(None))
        else:
            for part, first in (("gate", 0), ("up", 1)):
                views[f"{name}:{part}"] = _part(source, name, is_transposed, slice(first, None, 2))
    return _Arranged(source, views, hidden)


def _part(source: TensorSource, name: str, is_transposed: bool, outputs: slice) -> _View:
    shape = list(source.shape(name))
    if is_transposed:
        shape[-2:] = reversed(shape[-2:])
    shape[1] = len(range(shape[1])[outputs])

    def read() -> np.ndarray:
        values = source.read(name)
        return (values.swapaxes(-1, -2) if is_transposed else values)[:, outputs]

    return _View(tuple(shape), read)
