"""`Program`: a function of a step with all that is needed to compile it, and who hands it out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax


@dataclass(frozen=True, slots=True)
class Program:
    """A function that is to be compiled for one set of shapes.

    Attributes:
      name: tells programs with equal arguments apart; whatever was static is part of it.
      function: pure, of arrays alone.
      arguments: what it will be called with, or their abstract shapes.
      outputs: anything with the tree structure of what it returns.
      donated: indices of the arguments that a call uses up.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    outputs: Any
    donated: tuple[int, ...] = ()

    def compile(self) -> jax.stages.Compiled:
        """Trace, lower and compile it for the device here."""
        return jax.jit(self.function, donate_argnums=self.donated).lower(*self.arguments).compile()


class ProgramSource(Protocol):
    """Where compiled programs come from; threads may ask at once."""

    def make(self, program: Program) -> Any:
        """Return the compiled program: called like `program.function`."""
        ...
