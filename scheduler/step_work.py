"""What a step computes and moves, from sizes of the model: for metrics, plans and simulations."""

from collections import Counter
from dataclasses import dataclass, field

from paged.models.config import ModelConfig
from paged.models.model_size import ModelSize, model_size
from paged.models.weight_bytes import WeightBytes
from paged.scheduler.output import DeviceWork, SchedulerOutput
from paged.scheduler.simulator.step_cost import StepLoad
from paged.scheduler.step_rows import StepRows


def attended_pairs(start: int, count: int, window: int | None) -> int:
    """Return the pairs of a token of a row and a token that it attends to, itself included.

    Token i of a sequence, from 0, attends to i + 1 tokens, at most to the window.

    Args:
      start, count: first token of the row, and how many there are.
      window: of a layer, in tokens; None: it has none.
    """
    end = start + count
    full_end = end if window is None else max(start, min(end, window))
    full = (full_end * (full_end + 1) - start * (start + 1)) // 2
    return full + (end - full_end) * (window or 0)


def read_tokens(start: int, count: int, window: int | None) -> int:
    """Return the tokens whose keys and values a row reads, its own included; see above."""
    return start + count if window is None else min(start + count, window - 1 + count)


def step_flops(model: ModelConfig, size: ModelSize, load: StepLoad) -> int:
    """Return the operations of a step on all devices together; see `Roofline`."""
    attention = 4 * model.num_layers * model.num_q_heads * model.head_dim * load.attended_pairs
    return 2 * load.num_tokens * size.layer_matmul + 2 * load.num_samples * size.head + attention


def read_weights(model: ModelConfig, weights: WeightBytes, load: StepLoad) -> int:
    """Return the bytes of weights that a step reads, each once; see `Roofline`."""
    num_bytes = weights.layers + (weights.head if load.num_samples else 0)
    if model.experts is not None:
        share = model.experts.num_experts_per_token / model.experts.num_experts
        num_bytes += round(weights.experts * (1 - (1 - share) ** load.num_tokens))
    return num_bytes


@dataclass(frozen=True)
class StepWorkEstimate:
    """The work of each device in the steps of an engine.

    Attributes:
      model: of all devices together.
      weights: of one device, as they are stored.
      kv_token_bytes: of one token's keys and values over all layers, on one device.
      num_devices: that share the model.
    """

    model: ModelConfig
    weights: WeightBytes
    kv_token_bytes: int
    num_devices: int = 1
    _size: ModelSize = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_size", model_size(self.model))

    def __call__(self, scheduled: SchedulerOutput) -> DeviceWork:
        """Return what each device does in a step."""
        load = self.load_of(StepRows.of(scheduled.scheduled))
        if not load.num_tokens:
            return DeviceWork()
        written = load.num_tokens * self.kv_token_bytes
        read = load.context_tokens * self.kv_token_bytes
        return DeviceWork(
            step_flops(self.model, self._size, load) // self.num_devices,
            read_weights(self.model, self.weights, load) + read,
            written,
        )

    def load_of(self, rows: StepRows) -> StepLoad:
        """Return what the rows of a step load it with, pairs and contexts as means over layers."""
        pairs = context = 0
        spans = list(zip(rows.starts, rows.counts, strict=True))
        for window, num_layers in Counter(self.model.layer_windows).items():
            pairs += num_layers * sum(attended_pairs(*span, window) for span in spans)
            context += num_layers * sum(read_tokens(*span, window) for span in spans)
        num_layers = self.model.num_layers
        return StepLoad(
            sum(rows.counts),
            sum(rows.samples),
            round(pairs / num_layers),
            round(context / num_layers),
        )
