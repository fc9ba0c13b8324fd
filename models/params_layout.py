"""`ParamsLayout`: parameters from outside, checked and put where a running engine has them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from paged.models.forward import GraphDef
from paged.models.linear_packing import pack_linear_layers


@dataclass(frozen=True, slots=True)
class ParamsLayout:
    """What an engine's parameters are, and how they lie on its devices.

    Attributes:
      graphdef: structure of what one device computes.
      expected: shapes and dtypes of the parameters, as `paged.models.load` returns them.
      shardings: tree of shardings over all devices; None: the one device.
      kv_head_copies: how often each kv head is there (`TensorParallel`).
      is_packed: linear layers are packed for the native CPU kernels.
    """

    graphdef: GraphDef
    expected: nnx.State[Any, Any]
    shardings: Any = None
    kv_head_copies: int = 1
    is_packed: bool = False

    def arrange(self, params: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
        """Return parameters as the engine's programs take them.

        Arrays that lie where they should are returned as they are; packing copies linear layers.

        Args:
          params: named, shaped and typed like `expected`; they stay as they are.

        Raises:
          ValueError: if they are not; it lists all that does not fit.
        """
        values = self._checked(params)
        leaves = dict(nnx.to_flat_state(self.expected))
        if self.kv_head_copies > 1:
            values = {path: self._repeat(value, leaves[path]) for path, value in values.items()}
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.leaves(self.shardings) or [one] * len(values)
        placed = [
            _place(value, where) for value, where in zip(values.values(), shardings, strict=True)
        ]
        arranged: nnx.State[Any, Any] = jax.tree.unflatten(
            jax.tree.structure(self.expected), placed
        )
        if self.is_packed:
            arranged = pack_linear_layers(self.graphdef, arranged, keep=True, progress=False)
        return arranged

    def _checked(self, params: nnx.State[Any, Any]) -> dict[Any, Array]:
        """Return the values by path, in the order of `expected`."""
        expected = dict(nnx.to_flat_state(self.expected))
        given = dict(nnx.to_flat_state(params))
        problems = {
            "missing": [_name(path) for path in expected if path not in given],
            "unexpected": [_name(path) for path in given if path not in expected],
            "of another shape or dtype": [
                f"{_name(path)} {_describe(given[path])} instead of {_describe(leaf)}"
                for path, leaf in expected.items()
                if path in given and _describe(given[path]) != _describe(leaf)
            ],
        }
        if any(problems.values()):
            listed = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
            raise ValueError(
                f"params are not those of this engine; {'; '.join(listed)}. Pass parameters like "
                "those of paged.models.load(path, dtype=..., quantization=...) with the engine's "
                "own settings, cast to its dtype."
            )
        return {path: _value(given[path]) for path in expected}

    def _repeat(self, value: Array, leaf: Any) -> Array:
        axes = leaf.get_metadata("out_sharding")
        if "kv_heads" not in axes:
            return value
        return jnp.repeat(value, self.kv_head_copies, axis=axes.index("kv_heads"))


def _place(value: Any, sharding: jax.sharding.Sharding) -> Array:
    # Of an array of NumPy's, which its owner may write to, the CPU backend would keep a view.
    own = value if isinstance(value, Array) else np.array(value)
    placed: Array = jax.device_put(own, sharding)
    return placed


def _value(leaf: Any) -> Any:
    return leaf[...] if isinstance(leaf, nnx.Variable) else leaf


def _describe(leaf: Any) -> str:
    return f"{list(leaf.shape)} {leaf.dtype}"


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
