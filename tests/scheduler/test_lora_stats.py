"""What a step's figures say of requests that wait for a place for their adapter."""

from paged.scheduler.stats import StatsBuilder
from tests.scheduler.stepping import add, make_scheduler, step
from tests.scheduler.test_lora_slots import with_adapter


def test_who_waits_for_a_place_for_its_adapter_is_deferred():
    scheduler = make_scheduler(max_loras=1, max_num_seqs=2)
    names = ("sql", "chat", None, None, "chat")
    add(scheduler, *(with_adapter(str(i), name) for i, name in enumerate(names)))
    step(scheduler)
    stats = StatsBuilder().take(scheduler, step_seconds=0.0)
    assert (stats.num_running, stats.num_waiting) == (2, 3)
    assert stats.num_deferred == 2, "the third waits for a place in the batch"
    assert (stats.running_loras, stats.waiting_loras) == (("sql",), ("chat",))
    scheduler.abort(["0"])
    step(scheduler)
    stats = StatsBuilder().take(scheduler, step_seconds=0.0)
    assert stats.num_deferred == 0
    assert stats.running_loras == ("chat",)
