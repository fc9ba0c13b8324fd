"""`sweep`: one trace under several policies and capacities."""

import csv
import dataclasses
import pathlib
from collections.abc import Sequence

from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.pools import check_policy
from paged.scheduler.simulator.result import SimulationResult
from paged.scheduler.simulator.simulate import simulate
from paged.scheduler.simulator.step_cost import StepCost
from paged.scheduler.simulator.trace import Trace


def sweep(
    trace: Trace,
    config: SimulationConfig,
    *,
    policies: Sequence[str] = (),
    num_blocks: Sequence[int] = (),
    cost: StepCost | None = None,
    progress: bool = False,
) -> list[SimulationResult]:
    """Return one result per capacity and policy, capacities outermost.

    Args:
      trace: read once per run.
      config: everything else; its own policy or capacity counts where a list is empty.
      policies, num_blocks: the values to try.
      cost, progress: as in `simulate`.

    Raises: ValueError as `simulate`; for an unknown policy before the first run.
    """
    for policy in policies:
        check_policy(policy)
    return [
        simulate(
            trace,
            dataclasses.replace(config, num_blocks=blocks, policy=policy),
            cost,
            progress=progress,
        )
        for blocks in num_blocks or (config.num_blocks,)
        for policy in policies or (config.policy,)
    ]


def write_csv(results: Sequence[SimulationResult], path: str | pathlib.Path) -> None:
    """Write one line per result with every number of `SimulationResult.to_row`."""
    rows = [result.to_row() for result in results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
