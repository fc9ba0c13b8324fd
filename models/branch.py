"""`Branch`: what lies around the attention or the MLP of a layer.

The residual stream is float32 whatever the model's element type. All layers add to it, so it is
where the most roundings would meet, at the size of its largest features; it is a few bytes beside
the weights (docs/decisions/0052).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paged.models.layers import Linear, RMSNorm


class Branch(NamedTuple):
    """A branch of the residual stream: `x + multiplier * post_norm(f(norm(x)))`, f in between.

    Families differ in which norms there are. Whatever f is, it ends by `join`, or, where it ends
    with a linear layer, by `project_and_join`, which a CPU can do in one call.

    Attributes:
      dtype: element type that f computes in.
      norm: of what f reads; None: the stream as it is.
      post_norm: of what f gives; None: as it is.
      multiplier: of what is added.
    """

    dtype: str
    norm: RMSNorm | None
    post_norm: RMSNorm | None = None
    multiplier: float = 1.0

    def enter(
        self, x: Float[Array, "num_tokens hidden"]
    ) -> tuple[Float[Array, "num_tokens hidden"], RMSNorm | None]:
        """Return what f reads of the stream x, and the norm that goes first.

        They are apart for layers that a CPU computes in one call with a norm.
        """
        return (x.astype(self.dtype), None) if self.norm is None else (x, self.norm)

    def read(self, x: Float[Array, "num_tokens hidden"]) -> Float[Array, "num_tokens hidden"]:
        """Return what f reads of the stream x, normalised if there is a norm, of type `dtype`."""
        rows, norm = self.enter(x)
        return rows if norm is None else norm(rows)

    def join(
        self, x: Float[Array, "num_tokens hidden"], y: Float[Array, "num_tokens hidden"]
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the stream x with what f gave, y, added."""
        y = y.astype(jnp.float32) if self.post_norm is None else self.post_norm(y, is_wide=True)
        return x + (y if self.multiplier == 1 else y * self.multiplier)

    def project_and_join(
        self,
        x: Float[Array, "num_tokens hidden"],
        y: Float[Array, "num_tokens ..."],
        layer: Linear,
        num_rows: Int[Array, "1"],
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the stream x with `layer(y)`, which f gives, added; see `Linear`."""
        if self.post_norm is None and self.multiplier == 1:
            return layer(y, residual=x, num_rows=num_rows)
        return self.join(x, layer(y, is_wide=True, num_rows=num_rows))
