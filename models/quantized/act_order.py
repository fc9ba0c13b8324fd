"""`inputs_by_group`: inputs whose scales are for groups of any of them, put in order."""

import numpy as np


def inputs_by_group(groups: np.ndarray, group_size: int, name: str) -> np.ndarray:
    """Return the inputs in the order of their groups, `[num_inputs]`.

    Quantisation in the order of activations leaves inputs of one group apart; a product with
    weights and inputs in this order has groups of neighbours again.

    Args:
      groups: the group of each input.
      group_size: inputs of every group.
      name: of the tensor, for errors.

    Raises:
      ValueError: if the groups are not all of that size.
    """
    order = np.argsort(groups, kind="stable")
    if (groups[order] != np.arange(len(groups)) // group_size).any():
        raise ValueError(f"{name} does not put {group_size} inputs into each group")
    return order
