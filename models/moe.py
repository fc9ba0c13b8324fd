"""`SparseMLP`: a mixture of experts in the place of an MLP; a token passes through a few of many.

A router chooses some experts for every row. Pairs of a row and an expert are sorted by expert, so
that each expert multiplies one contiguous group of rows, and only the weights of experts that were
chosen are read. Nothing is dropped: a group is as long as it is. Padding is in no group.

Sources: arXiv:1701.06538 (sparse experts); MegaBlocks, arXiv:2211.15841 (groups of any length).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paged.expert_product import choose_backend, expert_product
from paged.models.branch import Branch
from paged.models.expert_groups import map_groups, sort_pairs
from paged.models.group_routing import choose_in_groups
from paged.models.moe_config import ExpertsConfig
from paged.models.mxfp4_weight import Mxfp4Weight
from paged.models.parameters import parameter, random_weight
from paged.models.quantized.grouped_weight import GroupedWeight
from paged.models.stored_weight import (
    StoredWeight,
    can_pack,
    multiply,
    one_of_stack,
    values_of,
)
from paged.native.expert_linear import are_packed_experts, packed_expert_linear
from paged.native.linear import PackedWeight


class Router(nnx.Module):
    """Scores of the experts for each row, and the choice among them; computed in float32.

    On every device and never quantised: it is small, and another choice is another function.
    """

    def __init__(
        self, hidden_size: int, config: ExpertsConfig, *, dtype: str, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        # Not "experts", along which weights may be split: each device needs all scores.
        weight = random_weight(
            {"router": config.num_experts, "embed": hidden_size}, dtype=dtype, rngs=rngs
        )
        self.weight = parameter(weight[...], (None, "embed"))
        bias = jnp.zeros(config.num_experts, dtype)
        self.bias = parameter(bias, (None,)) if config.router_bias else None
        has_choice_bias = config.routing is not None and config.routing.has_bias
        # float32 in any model: rounded, it would choose other experts.
        choice_bias = jnp.zeros(config.num_experts, jnp.float32)
        self.choice_bias = parameter(choice_bias, (None,)) if has_choice_bias else None

    def __call__(
        self, rows: Float[Array, "num_tokens hidden"]
    ) -> tuple[Int[Array, "num_tokens num_chosen"], Float[Array, "num_tokens num_chosen"]]:
        """Return the experts of each row, the best first, and what their outputs are scaled by."""
        scores = jnp.einsum("TD,ED->TE", rows, self.weight[...], preferred_element_type=jnp.float32)
        if self.bias is not None:
            scores += self.bias[...].astype(jnp.float32)[None]
        if self.config.routing is not None:
            choice_bias = None if self.choice_bias is None else self.choice_bias[...]
            return choose_in_groups(scores, choice_bias, self.config, self.config.routing)
        best, chosen = jax.lax.top_k(scores, self.config.num_experts_per_token)
        if self.config.normalize:
            # The same as the softmax over all, divided by the sum of what is chosen of it.
            return chosen, jax.nn.softmax(best, axis=-1)
        return chosen, jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))


class ExpertLinear(nnx.Module):
    """The linear layers that the experts have at one place, stacked.

    Args:
      axes: name and size of each axis of the weight: experts, outputs, inputs.
      config: whether they have biases, and how the weights are stored.
      dtype: element type of the parameters.
      rngs: source of the initial values.

    Attributes:
      axes: those names.
      sum_axis: mesh axis whose devices have the other inputs. Whoever calls it sums the products;
        the first device's have the bias. None: all inputs are here.
    """

    def __init__(
        self, axes: dict[str, int], config: ExpertsConfig, *, dtype: str, rngs: nnx.Rngs
    ) -> None:
        self.axes = tuple(axes)
        self.sum_axis: str | None = None
        self.output_shape = tuple(axes.values())[:2]
        self.weight: StoredWeight
        if config.is_mxfp4:
            self.weight = Mxfp4Weight(axes, rngs=rngs)
        else:
            self.weight = random_weight(axes, dtype=dtype, rngs=rngs)
        bias = jnp.zeros(self.output_shape, dtype)
        self.bias = parameter(bias, tuple(axes)[:2]) if config.expert_bias else None

    @property
    def can_pack(self) -> bool:
        """Whether the native kernels have products of groups of rows with such weights."""
        # Inputs of experts are in one order for all of them.
        is_permuted = isinstance(self.weight, GroupedWeight) and self.weight.order is not None
        return can_pack(self.weight) and not is_permuted

    def packed(self) -> PackedWeight:
        """Return what the native kernels take, of weights that are packed."""
        _, num_outputs = self.output_shape
        bias = self._bias_here()
        if isinstance(self.weight, nnx.Param):
            return PackedWeight(self.weight[...], num_outputs, None, bias)
        packed = self.weight.packed(num_outputs)
        assert packed.scales is not None, "weights of experts in fewer bits have scales"
        # Of whole outputs; those of groups have the axis of experts already.
        scales = packed.scales
        scales = scales.reshape(self.output_shape) if scales.ndim == 1 else scales
        return packed._replace(scales=scales, bias=bias)

    def of_groups(
        self,
        x: Float[Array, "n num_inputs"],
        group_ends: Int[Array, "num_experts"],
        backend: str,
    ) -> Float[Array, "n num_outputs"]:
        """Return the products of all groups of rows, by `expert_product`, of plain weights."""
        assert isinstance(self.weight, nnx.Param), "not a plain weight"
        bias = self._bias_here()
        return expert_product(x, self.weight[...], bias, group_ends, backend=backend)

    def of_expert(
        self, expert: Int[Array, ""], x: Float[Array, "n num_inputs"]
    ) -> Float[Array, "n num_outputs"]:
        """Return one expert's product, in x's dtype."""
        _, num_outputs = self.output_shape
        y = multiply(one_of_stack(self.weight, expert), x, num_outputs)
        bias = self._bias_here()
        return y if bias is None else y + bias[expert][None]

    def _bias_here(self) -> Array | None:
        """Return the biases, or zeros where another device adds them to the sum."""
        if self.bias is None or self.sum_axis is None:
            return None if self.bias is None else self.bias[...]
        return jnp.where(jax.lax.axis_index(self.sum_axis) == 0, self.bias[...], 0)


class Experts(nnx.Module):
    """The MLPs of one layer, stacked along the logical axis "experts".

    Attributes:
      expert_axis: mesh axis whose devices have the other experts, in order; None: all are here.
      sum_axis: mesh axis over which the outputs are summed, of other experts or of other features
        of these; None: all are here.
      backend: of `expert_product`. "xla" has a gradient, but multiplies each row by all experts;
        "auto" is a kernel, or else a loop over the groups.
    """

    def __init__(
        self, hidden_size: int, config: ExpertsConfig, *, dtype: str, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        self.expert_axis: str | None = None
        self.sum_axis: str | None = None
        self.backend = "auto"
        experts = {"experts": config.num_experts_here or config.num_experts}
        mlp, embed = {"mlp": config.intermediate_size}, {"embed": hidden_size}

        def project(out: dict[str, int], into: dict[str, int]) -> ExpertLinear:
            return ExpertLinear(experts | out | into, config, dtype=dtype, rngs=rngs)

        self.gate_proj = project(mlp, embed)
        self.up_proj = project(mlp, embed)
        self.down_proj = project(embed, mlp)

    def __call__(
        self,
        rows: Float[Array, "num_tokens hidden"],
        chosen: Int[Array, "num_tokens num_chosen"],
        scales: Float[Array, "num_tokens num_chosen"],
        num_rows: Int[Array, "1"],
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the sum of each row's experts, each times its scale; zero from `num_rows` on.

        It is float32, or of the rows' dtype where it is summed over devices.
        A number in `chosen` that is none of these experts adds nothing.
        """
        num_experts, hidden_size = self.down_proj.output_shape
        if self.expert_axis is not None:
            chosen = chosen - jax.lax.axis_index(self.expert_axis) * num_experts
        pairs = sort_pairs(chosen, num_rows, num_experts)
        x = rows.at[pairs.rows].get(mode="clip")
        if self._is_packed:
            outputs = self._packed_outputs(x, pairs.group_ends)
        elif self._has_product(x):
            outputs = self._products(x, pairs.group_ends)
        else:
            outputs = map_groups(self._of_expert, x, pairs.group_ends, num_outputs=hidden_size)
        # Back in the order of rows; wide, so that the sum is rounded once.
        outputs = outputs.at[pairs.places].get(mode="clip").astype(jnp.float32)
        # Not only the scales: what was not computed need not be a number.
        outputs = jnp.where(pairs.is_computed[..., None], outputs, 0)
        scales = jnp.where(pairs.is_computed, scales, 0)
        mixed = jnp.einsum("TK,TKD->TD", scales, outputs)
        if self.sum_axis is None:
            return mixed
        # Rounded, to be half the bytes.
        summed: Array = jax.lax.psum(mixed.astype(rows.dtype), self.sum_axis)  # type: ignore[no-untyped-call]
        return summed

    @property
    def _layers(self) -> tuple[ExpertLinear, ExpertLinear, ExpertLinear]:
        return self.gate_proj, self.up_proj, self.down_proj

    @property
    def _is_packed(self) -> bool:
        return all(are_packed_experts(values_of(layer.weight)[...]) for layer in self._layers)

    def _packed_outputs(self, x: Array, group_ends: Array) -> Array:
        mixed = packed_expert_linear(
            x,
            group_ends,
            [self.gate_proj.packed(), self.up_proj.packed()],
            activation=self.config.activation,
            gate_slope=self.config.swiglu_alpha,
            gate_limit=self.config.swiglu_limit,
        )
        return packed_expert_linear(mixed, group_ends, [self.down_proj.packed()])

    def _has_product(self, x: Array) -> bool:
        """Return whether the products of all groups are computed at once."""
        weights = [layer.weight for layer in self._layers]
        return all(
            isinstance(weight, nnx.Param)
            and (self.backend != "auto" or choose_backend(x, weight[...]) == "triton")
            for weight in weights
        )

    def _products(self, x: Array, group_ends: Array) -> Array:
        gate, up = (
            layer.of_groups(x, group_ends, self.backend) for layer in (self.gate_proj, self.up_proj)
        )
        return self.down_proj.of_groups(self._gated(gate, up), group_ends, self.backend)

    def _of_expert(self, expert: Array, x: Array) -> Array:
        gate, up = self.gate_proj.of_expert(expert, x), self.up_proj.of_expert(expert, x)
        return self.down_proj.of_expert(expert, self._gated(gate, up))

    def _gated(self, gate: Array, up: Array) -> Array:
        if self.config.activation == "silu":
            return jax.nn.silu(gate) * up
        alpha, limit = self.config.swiglu_alpha, self.config.swiglu_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


class SparseMLP(nnx.Module):
    """A router and its experts, in the place of `MLP`.

    Args:
      hidden_size: features of the residual stream.
      config: shape of the mixture.
      dtype: element type of parameters and activations.
      rngs: source of the initial parameters.
      shared: an MLP that every token passes through beside its experts; called as this is. None:
        there is none.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        *,
        dtype: str,
        rngs: nnx.Rngs,
        shared: Callable[[Array, Branch, Array], Array] | None = None,
    ) -> None:
        self.shared = shared
        self.router = Router(hidden_size, config, dtype=dtype, rngs=rngs)
        self.experts = Experts(hidden_size, config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], branch: Branch, num_rows: Int[Array, "1"]
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the stream x after this branch; rows from `num_rows` on are padding."""
        rows = branch.read(x)
        chosen, scales = self.router(rows)
        if self.shared is not None:
            # It joins the stream by itself, which is the same where no norm is after the sum.
            assert branch.post_norm is None
            x = self.shared(x, branch, num_rows)
        return branch.join(x, self.experts(rows, chosen, scales, num_rows))
