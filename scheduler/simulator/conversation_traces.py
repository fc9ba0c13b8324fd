"""Traces whose prompts repeat earlier outputs: chats with a shared system prompt, agent trees."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paged.scheduler.simulator.arrivals import LengthDistribution, arrival_times
from paged.scheduler.simulator.trace import Segment, Trace, TraceRequest

_USER = LengthDistribution(mean=80.0, sigma=1.0)
_ANSWER = LengthDistribution(mean=250.0, sigma=0.8)


def chat(
    sessions: int = 100,
    turns: int = 5,
    system_prompt_tokens: int = 500,
    user: LengthDistribution = _USER,
    answer: LengthDistribution = _ANSWER,
    session_rate: float = 0.5,
    think_seconds: float = 30.0,
    seed: int = 0,
) -> Trace:
    """Return conversations in which each turn's prompt is all that was said before.

    Sessions start as a Poisson process; between two turns of one lies an exponential pause. The
    next turn's arrival does not wait for the answer: where the pause is shorter than the service
    takes, the trace asks for an answer's blocks before they exist, and gets no hit on them.
    `pass_index` is the turn, so figures per pass are figures per turn.

    Args:
      sessions: conversations.
      turns: messages of the user in each.
      system_prompt_tokens: length of the system prompt that all share.
      user, answer: lengths of messages.
      session_rate: sessions started per second.
      think_seconds: mean pause between two turns.
      seed: of all draws.

    Raises: ValueError if a count is below 1 or the rate is not positive.
    """
    _check_counts(sessions=sessions, turns=turns, system_prompt_tokens=system_prompt_tokens)

    def generate() -> Iterator[TraceRequest]:
        rng = np.random.default_rng(seed)
        starts = arrival_times(session_rate, seed=seed + 1)
        # Only sessions that have begun are held: (arrival, session, turn, what was said).
        active: list[tuple[float, int, int, tuple[Segment, ...]]] = []
        next_start, begun = next(starts), 0
        while active or begun < sessions:
            if begun < sessions and (not active or next_start <= active[0][0]):
                heapq.heappush(active, (next_start, begun, 0, (("system", system_prompt_tokens),)))
                next_start, begun = next(starts), begun + 1
                continue
            now, session, turn, said = heapq.heappop(active)
            (asked,), (answered,) = user.draw(rng, 1), answer.draw(rng, 1)
            prompt = (*said, (f"user-{session}-{turn}", asked))
            name = f"answer-{session}-{turn}"
            yield TraceRequest(prompt, answered, now, output=name, pass_index=turn, session=session)
            if turn + 1 < turns:
                later = now + float(rng.exponential(think_seconds))
                heapq.heappush(active, (later, session, turn + 1, (*prompt, (name, answered))))

    return Trace("chat", generate, sessions * turns, has_arrivals=True)


def agent_tree(
    tasks: int = 10,
    depth: int = 4,
    branching: int = 3,
    system_prompt_tokens: int = 1500,
    task_tokens: int = 500,
    observation_tokens: int = 200,
    action_tokens: int = 100,
    tasks_at_once: int = 2,
) -> Trace:
    """Return tree searches: each node's prompt is its parent's prompt and output, and news.

    A task is a full tree of `branching` children per node, walked depth first; `tasks_at_once`
    of them take turns, one node each. `pass_index` is the depth of the node.

    Args:
      tasks, depth, branching: trees; levels of each; children per inner node.
      system_prompt_tokens: shared by all tasks.
      task_tokens: what a task adds at its root.
      observation_tokens: what each child adds to its parent's output.
      action_tokens: output of each node.
      tasks_at_once: trees that are interleaved.

    Raises: ValueError if a count is below 1.
    """
    _check_counts(
        tasks=tasks,
        depth=depth,
        branching=branching,
        system_prompt_tokens=system_prompt_tokens,
        task_tokens=task_tokens,
        observation_tokens=observation_tokens,
        action_tokens=action_tokens,
        tasks_at_once=tasks_at_once,
    )
    tree = _Tree(depth, branching, observation_tokens, action_tokens)

    def generate() -> Iterator[TraceRequest]:
        for first in range(0, tasks, tasks_at_once):
            walks = [
                tree.walk(
                    task, f"{task}", 0, (("system", system_prompt_tokens), (task, task_tokens))
                )
                for task in range(first, min(first + tasks_at_once, tasks))
            ]
            # The trees are equally large, so that all walks end in the same round.
            for nodes in zip(*walks, strict=True):
                yield from nodes

    nodes_per_task = sum(branching**level for level in range(depth))
    return Trace("agent-tree", generate, tasks * nodes_per_task)


@dataclass(frozen=True, slots=True)
class _Tree:
    """The shape of a search tree and the lengths of its nodes."""

    depth: int
    branching: int
    observation_tokens: int
    action_tokens: int

    def walk(
        self, task: int, node: str, level: int, prompt: tuple[Segment, ...]
    ) -> Iterator[TraceRequest]:
        """Yield the requests of a node and all below it, depth first."""
        yield TraceRequest(
            prompt, self.action_tokens, output=f"act-{node}", pass_index=level, session=task
        )
        if level + 1 == self.depth:
            return
        for child in range(self.branching):
            name = f"{node}.{child}"
            news = ((f"act-{node}", self.action_tokens), (f"see-{name}", self.observation_tokens))
            yield from self.walk(task, name, level + 1, (*prompt, *news))


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
