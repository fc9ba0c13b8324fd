"""`Branch`: what lies around the attention or the MLP of a layer."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from paged.models.layers import Linear, RMSNorm


class Branch(NamedTuple):
    """A branch of the residual stream: `x + multiplier * post_norm(f(norm(x)))`, f in between.

    Families differ in which norms there are. Whatever f is, it ends by `join`, or, where it ends
    with a linear layer, by `project_and_join`, which a CPU can do in one call.

    Attributes:
      norm: of what f reads; None: the stream as it is.
      post_norm: of what f gives; None: as it is.
      multiplier: of what is added.
    """

    norm: RMSNorm | None
    post_norm: RMSNorm | None = None
    multiplier: float = 1.0

    def join(
        self, x: Float[Array, "num_tokens hidden"], y: Float[Array, "num_tokens hidden"]
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the stream x with what f gave, y, added."""
        if self.post_norm is not None:
            y = self.post_norm(y)
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
        return self.join(x, layer(y, num_rows=num_rows))
