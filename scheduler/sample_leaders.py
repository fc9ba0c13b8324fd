"""`SampleLeaders`: without a prefix cache, the samples of one prompt fork the first of them."""

from collections.abc import Set

from paged.scheduler.request import Request, RequestStatus


class SampleLeaders:
    """For each prompt with several samples the one that computes it (mutable).

    Args:
      is_needed: False if a prefix cache shares prompts anyway; then there are no leaders.
    """

    def __init__(self, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._by_parent: dict[str, Request] = {}

    def on_start(self, request: Request) -> None:
        """Note that a request runs: the first sample of a prompt leads."""
        if self._is_needed and request.num_samples > 1:
            self._by_parent.setdefault(request.parent_id, request)

    def on_end(self, request: Request) -> None:
        """Note that a request has ended: the next sample that starts leads."""
        if self._by_parent.get(request.parent_id) is request:
            del self._by_parent[request.parent_id]

    def leader_of(self, request: Request) -> Request | None:
        """Return the running sample whose prompt a waiting one may share."""
        if not self._by_parent or request.num_preemptions:
            return None
        leader = self._by_parent.get(request.parent_id)
        return leader if leader and leader.status is RequestStatus.RUNNING else None

    def ready_parents(self) -> Set[str]:
        """Return the parents whose whole prompt is computed, or will be by a dispatched step.

        Ask before a step is planned: what that step computes cannot be copied before it.
        """
        return {
            parent_id
            for parent_id, leader in self._by_parent.items()
            if leader.num_computed_tokens >= leader.num_prompt_tokens
        }
