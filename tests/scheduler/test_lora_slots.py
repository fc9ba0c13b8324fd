"""Who gets a slot for its adapter, who waits for one, and who overtakes meanwhile."""

from typing import ClassVar, NamedTuple

import pytest

from paged.scheduler.lora_store import Adapter
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler
from tests.scheduler.stepping import add, deliver, ids, make_request, make_scheduler, step


class Weights(NamedTuple):
    digest: str
    layers: dict = {}  # noqa: RUF012 - nobody looks


def adapter(name: str, digest: str | None = None) -> Adapter:
    return Adapter(name, Weights(digest or f"content of {name}"))


def with_adapter(request_id: str, name: str | None, num_tokens: int = 20, **settings) -> Request:
    named = None if name is None else adapter(name)
    return make_request(request_id, num_tokens, adapter=named, **settings)


def loads(scheduler: Scheduler) -> list[tuple[int, str]]:
    """Run a step; return which adapters it puts into which slots."""
    output = scheduler.schedule()
    deliver(scheduler, output)
    return [(slot, loaded.name) for slot, loaded in output.lora_loads]


def test_requests_beyond_the_slots_wait_and_the_others_pass():
    scheduler = make_scheduler(max_loras=1)
    a, b, base, more_a = (
        with_adapter("a", "sql"),
        with_adapter("b", "chat"),
        with_adapter("c", None),
        with_adapter("d", "sql"),
    )
    add(scheduler, a, b, base, more_a)
    assert step(scheduler) == {"a": 20, "c": 20, "d": 20}
    assert ids(scheduler.waiting) == ["b"]
    assert [r.lora_slot for r in (a, b, base, more_a)] == [1, 0, 0, 1]
    assert scheduler.loras.running_names == ("sql",)
    assert scheduler.loras.waiting_names == ("chat",)
    scheduler.abort(["a"])
    assert "b" not in step(scheduler)
    scheduler.abort(["d"])
    assert step(scheduler)["b"] == 20
    assert scheduler.loras.running_names == ("chat",)
    assert scheduler.loras.waiting_names == ()


def test_a_slot_is_loaded_once_and_the_least_recently_used_is_given_up():
    scheduler = make_scheduler(max_loras=2)
    add(scheduler, with_adapter("a", "x"), with_adapter("b", "y"), with_adapter("c", "x"))
    assert loads(scheduler) == [(1, "x"), (2, "y")]
    scheduler.abort(["a", "b", "c"])
    add(scheduler, with_adapter("d", "x"))
    assert loads(scheduler) == []  # still there
    scheduler.abort(["d"])
    add(scheduler, with_adapter("e", "z"))
    assert loads(scheduler) == [(2, "z")]
    add(scheduler, with_adapter("f", "x"))
    assert loads(scheduler) == []


def test_equal_contents_share_a_slot_and_other_contents_do_not():
    scheduler = make_scheduler(max_loras=2)
    requests = [
        make_request("a", 20, adapter=adapter("old", "digest-1")),
        make_request("b", 20, adapter=adapter("alias", "digest-1")),
        make_request("c", 20, adapter=adapter("old", "digest-2")),
    ]
    add(scheduler, *requests)
    assert loads(scheduler) == [(1, "old"), (2, "old")]
    assert [request.lora_slot for request in requests] == [1, 1, 2]
    assert scheduler.loras.running_names == ("alias", "old")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_gives_its_slot_back_and_gets_one_again(policy):
    scheduler = make_scheduler(num_blocks=5, max_model_len=64, max_loras=1, policy=policy)
    first = with_adapter("a", None, 31)
    second = with_adapter("b", "sql", 31, priority=1)
    add(scheduler, first, second)
    while second.num_preemptions == 0:
        step(scheduler)
    assert second.lora_slot == 0
    assert scheduler.loras.waiting_names == ("sql",)
    # Somebody else takes the slot meanwhile, and the adapter has to be loaded again.
    scheduler.abort(["a"])
    other = with_adapter("c", "chat", 10, priority=-1, max_tokens=1)
    add(scheduler, other)
    if policy == "priority":
        assert loads(scheduler) == [(1, "chat")]
        assert other.is_finished
        assert loads(scheduler) == [(1, "sql")]
    else:
        assert loads(scheduler) == []
    assert second.lora_slot == 1


class WatchedWeights:
    """Counts how often somebody asks what they are."""

    layers: ClassVar[dict] = {}
    num_asked = 0

    @property
    def digest(self) -> str:
        self.num_asked += 1
        return "content"


def test_many_that_wait_for_one_slot_are_not_all_looked_at():
    scheduler = make_scheduler(max_loras=1)
    add(scheduler, with_adapter("a", "x"))
    weights = WatchedWeights()
    waiting = [make_request(f"b{i}", 20, adapter=Adapter("y", weights)) for i in range(50)]
    add(scheduler, *waiting)
    weights.num_asked = 0
    assert step(scheduler) == {"a": 20}
    assert weights.num_asked < 5
    assert ids(scheduler.waiting) == ids(waiting)


def test_a_fork_has_the_slot_of_its_parent():
    scheduler = make_scheduler(max_loras=1)
    parent = with_adapter("a", "x")
    add(scheduler, parent)
    step(scheduler)
    child = Request("b", parent.prompt_token_ids, parent.params, 5, adapter=parent.adapter)
    scheduler.fork(parent, child)
    assert child.lora_slot == parent.lora_slot == 1
    with pytest.raises(ValueError, match="under the same salt and adapter"):
        scheduler.fork(parent, Request("c", parent.prompt_token_ids, parent.params, 5))


def test_abort_of_who_waits_is_noticed():
    scheduler = make_scheduler(max_loras=1)
    add(scheduler, with_adapter("a", "x"), with_adapter("b", "y"))
    step(scheduler)
    scheduler.abort(["b"])
    assert scheduler.loras.waiting_names == ()
    assert scheduler.loras.num_blocked == 0
    scheduler.abort(["a"])
    assert scheduler.loras.running_names == ()
