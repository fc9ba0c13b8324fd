"""`LLM` without a model: what it passes to the engine, and what it asks of it."""

from types import SimpleNamespace

import numpy as np
import pytest

from paged.scheduler import llm as llm_module
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.cache_events import AllBlocksCleared, BlockStored
from paged.scheduler.config import EngineConfig
from paged.scheduler.eviction.policies import DEFAULT_POLICY
from paged.scheduler.llm import LLM
from paged.scheduler.loading import LoadedEngine
from paged.scheduler.params import ParameterError, SamplingParams
from paged.scheduler.request import CacheMode
from paged.scheduler.scheduler import Scheduler
from tests.scheduler.fakes import make_engine, spell

ONE = SamplingParams(max_tokens=1)
TEMPLATE = SimpleNamespace(render=lambda messages, **_: messages[0]["content"])
PROMPT = list(range(65, 65 + 17))  # four full blocks of 4 and one token


@pytest.fixture
def configs(monkeypatch) -> list[EngineConfig]:
    """The settings of every `LLM` that the test makes; its engine has no model."""
    seen = []

    def load(_model, config, *, progress):
        seen.append(config)
        return LoadedEngine(
            engine=make_engine(spell("hello")),
            checkpoint=SimpleNamespace(name="fake", chat_template=TEMPLATE),
            config=config,
            max_model_len=128,
            cache_info={},
        )

    monkeypatch.setattr(llm_module, "load_engine", load)
    return seen


@pytest.fixture
def llm(configs) -> LLM:
    return LLM()


def scheduled(llm: LLM):
    """Return the requests in the order of their first step."""
    steps = llm._engine.runner.steps
    return list(
        {row.request.request_id: row.request for s in steps for row in s.scheduled}.values()
    )


def test_a_list_of_prompts_is_a_queue_to_look_ahead_in(configs):
    LLM()
    LLM(prefix_cache_policy="arc")
    LLM(max_num_seqs=4)
    LLM(config=EngineConfig())
    policies = [config.prefix_cache_policy for config in configs]
    assert policies == ["lookahead", "arc", "lookahead", DEFAULT_POLICY]


def test_prompt_mappings_say_how_they_are_treated(llm):
    prompts = [
        {"prompt": "ab", "cache_salt": "s", "cache": "no_store", "priority": -2},
        {"prompt_token_ids": [65, 66], "cache": "pin"},
        {"prompt": "ab"},
        "ab",
    ]
    llm.generate(prompts, ONE, use_tqdm=False)
    got = [(r.cache_salt, r.cache_mode, r.priority) for r in scheduled(llm)]
    assert got == [
        ("s", CacheMode.NO_STORE, -2),
        (None, CacheMode.PIN, 0),
        (None, CacheMode.DEFAULT, 0),
        (None, CacheMode.DEFAULT, 0),
    ]


@pytest.mark.parametrize("priority", [[3, -1], (3, -1), np.array([3, -1])])
def test_priorities_of_the_call_override_those_of_the_prompts(llm, priority):
    llm.generate([{"prompt": "a", "priority": 9}, "b"], ONE, use_tqdm=False, priority=priority)
    conversations = [[{"role": "user", "content": text}] for text in "cd"]
    llm.chat(conversations, ONE, use_tqdm=False, priority=priority)
    got = [request.priority for request in scheduled(llm)]
    assert got == [3, -1, 3, -1]
    assert all(type(value) is int for value in got)


def test_the_more_urgent_go_first_under_the_priority_policy(llm):
    llm._engine.scheduler = Scheduler(
        pool=BlockPool(65, 4),
        max_num_seqs=1,
        max_num_batched_tokens=32,
        max_model_len=128,
        policy="priority",
    )
    outputs = llm.generate(["a", "b", "c"], ONE, use_tqdm=False, priority=[5, -5, 0])
    assert [request.priority for request in scheduled(llm)] == [-5, 0, 5]
    assert [output.prompt for output in outputs] == ["a", "b", "c"]


def test_one_prompt_has_one_priority(llm):
    llm.generate("ab", ONE, use_tqdm=False, priority=[5])
    assert scheduled(llm)[0].priority == 5


def test_there_are_as_many_priorities_as_prompts(llm):
    with pytest.raises(ValueError, match="Got 1 priorities for 2 prompts"):
        llm.generate(["a", "b"], ONE, use_tqdm=False, priority=[1])
    assert not llm._engine.has_unfinished


def test_a_prompt_with_an_unknown_cache_mode_stops_all_of_them(llm):
    with pytest.raises(ParameterError, match="cache must be one of default, no_store, pin"):
        llm.generate(["a", {"prompt": "b", "cache": "nope"}], ONE, use_tqdm=False)
    assert not llm._engine.has_unfinished


def test_a_priority_is_an_integer(llm):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        llm.generate(["a", "b"], ONE, use_tqdm=False, priority=[1, "high"])
    assert not llm._engine.has_unfinished


def cached_tokens(llm: LLM) -> int:
    (output,) = llm.generate([PROMPT], ONE, use_tqdm=False)
    return output.num_cached_tokens


def test_a_reset_forgets_the_prefixes(llm):
    assert [cached_tokens(llm) for _ in range(2)] == [0, 16]
    assert llm.reset_prefix_cache()
    assert cached_tokens(llm) == 0


def test_a_new_weights_epoch_forgets_the_prefixes(llm):
    assert [cached_tokens(llm) for _ in range(2)] == [0, 16]
    llm.advance_weights_epoch()
    assert [cached_tokens(llm) for _ in range(2)] == [0, 16]


def test_a_request_in_between_keeps_a_reset_from_happening_unless_it_may_be_preempted(llm):
    llm._engine.add_request("other", PROMPT, SamplingParams(max_tokens=5))
    llm._engine.step()
    assert not llm.reset_prefix_cache()
    assert llm.reset_prefix_cache(reset_running_requests=True)


def test_subscribers_hear_of_the_cache_until_they_leave(llm):
    events = []
    unsubscribe = llm.subscribe_cache_events(events.append)
    cached_tokens(llm)
    llm.reset_prefix_cache()
    stored, cleared = events
    assert isinstance(stored, BlockStored)
    assert list(stored.token_ids) == PROMPT[:16]
    assert cleared == AllBlocksCleared()
    unsubscribe()
    cached_tokens(llm)
    assert len(events) == 2
