"""Metrics of scripted workloads: every number is worked out by hand beside the workload.

A step takes a quarter of a second, blocks hold four tokens, and every token is an "x".
"""

import asyncio
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paged.models.tokenizer import Tokenizer
from paged.scheduler.admission import InputProcessor
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.block_residency import ResidencySampler
from paged.scheduler.engine import Engine
from paged.scheduler.errors import EngineDeadError
from paged.scheduler.output import DeviceWork, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.scheduler import Scheduler
from paged.server.metrics import EngineMetrics
from paged.server.optional_metrics import ResidencyMetrics, WorkMetrics
from tests.scheduler.fake_device import FakeTiers
from tests.scheduler.fakes import TINY_TOKENIZER, VOCAB_SIZE, FakeRunner, FakeStep
from tests.scheduler.test_async_engine import endless, serve

STEP_SECONDS = 0.25
TEN_TOKENS = list(range(60, 70))


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class WaitableTiers(FakeTiers):
    def wait(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        pass


@dataclass
class TimedRunner(FakeRunner):
    """A runner whose steps take their time, and whose evicted blocks go to the tiers."""

    clock: Clock = field(default_factory=Clock)
    tiers: WaitableTiers | None = None

    def execute(self, output: SchedulerOutput) -> FakeStep:
        step = super().execute(output)
        for _, key in output.saves:
            assert self.tiers is not None
            self.tiers.store(key, [0] * 4)

        def sample():
            self.clock.now += STEP_SECONDS
            return step.sample()

        return FakeStep(sample)


class TwoTokens:
    """A grammar that two tokens exhaust without coming to its end: the third is an error."""

    is_over = False
    error = "no token is allowed"

    def __init__(self) -> None:
        self.num_left = 2

    def accept(self, token_id: int) -> bool:
        self.num_left -= 1
        return self.num_left >= 0

    def take_forced(self, limit: int) -> list[int]:
        return []


class Workload:
    """An engine whose every step is observed by metrics."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        budget: int = 32,
        max_num_seqs: int = 8,
        max_model_len: int = 128,
        caching: bool = True,
        tiers: WaitableTiers | None = None,
        async_scheduling: bool = False,
    ) -> None:
        self.clock = Clock()
        self.metrics = EngineMetrics("m", max_model_len, {})
        for part in (ResidencyMetrics, WorkMetrics):
            self.metrics.add(part(self.metrics.labels, self.metrics.registry))
        tokenizer = Tokenizer.from_directory(TINY_TOKENIZER)
        pool = BlockPool(num_blocks, 4, caching)
        pool.residency = ResidencySampler(1.0, clock=self.clock)
        self.engine = Engine(
            scheduler=Scheduler(
                pool=pool,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
                tiers=tiers,
                clock=self.clock,
            ),
            runner=TimedRunner(lambda request: ord("x"), clock=self.clock, tiers=tiers),
            tokenizer=tokenizer,
            tiers=tiers,
            async_scheduling=async_scheduling,
            estimate_work=lambda step: DeviceWork(100 * step.num_tokens, 10, step.num_tokens),
            clock=self.clock,
            processor=InputProcessor(
                tokenizer, vocab_size=VOCAB_SIZE, max_model_len=max_model_len, seed=0
            ),
        )

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        n: int = 1,
        wait: float = 0,
        constraint: "TwoTokens | None" = None,
    ) -> None:
        """Queue a request that arrived `wait` seconds ago."""
        params = SamplingParams(max_tokens=max_tokens, n=n)
        arrived = self.clock.now - wait
        requests = self.engine.processor.process(name, prompt, params, arrival_time=arrived)
        requests[0].constraint = constraint
        self.engine.add_processed(requests)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            _, stats = self.engine.step()
            self.metrics.observe(stats)

    def run(self) -> None:
        while self.engine.has_unfinished:
            self.step()

    def abort(self, *names: str) -> None:
        self.engine.abort(names)
        self.metrics.observe(self.engine.take_stats())

    def values(self) -> dict[str, float]:
        """Return value by name, labels cut to those that not every series has."""
        page = self.metrics.render().decode()
        values = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                own = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(own.items()))
                name = sample.name.removeprefix("vllm:") + (f"{{{labels}}}" if own else "")
                values[name] = sample.value
        return values

    def histogram(self, name: str) -> tuple[float, float]:
        """Return how many observations there were, and their sum."""
        values = self.values()
        return values[f"{name}_count"], values[f"{name}_sum"]


def check(got: dict[str, float], expected: dict[str, float]) -> None:
    assert {name: got[name] for name in expected} == expected


def test_times_of_a_request_and_a_prefix_that_the_second_one_finds():
    load = Workload()
    # Arrives at 100, is queued at 100.5, first scheduled at 101; tokens at 101.25, .5 and .75.
    load.clock.now += 0.5
    load.add("a", TEN_TOKENS, 3, wait=0.5)
    load.clock.now += 0.5
    load.run()
    assert load.histogram("time_to_first_token_seconds") == (1, 1.25)
    assert load.histogram("inter_token_latency_seconds") == (2, 0.5)
    assert load.histogram("request_time_per_output_token_seconds") == (1, 0.25)
    assert load.histogram("e2e_request_latency_seconds") == (1, 1.75)
    assert load.histogram("request_queue_time_seconds") == (1, 0.5)
    assert load.histogram("request_prefill_time_seconds") == (1, 0.25)
    assert load.histogram("request_decode_time_seconds") == (1, 0.5)
    assert load.histogram("request_inference_time_seconds") == (1, 0.75)
    # The second finds the two full blocks, and computes two tokens and one after them.
    load.add("b", TEN_TOKENS, 2)
    load.run()
    check(
        load.values(),
        {
            "prefix_cache_queries_total": 20,
            "prefix_cache_hits_total": 8,
            "prompt_tokens_total": 20,
            "prompt_tokens_cached_total": 8,
            'prompt_tokens_by_source_total{source="local_compute"}': 12,
            'prompt_tokens_by_source_total{source="local_cache_hit"}': 8,
            'prompt_tokens_by_source_total{source="external_kv_transfer"}': 0,
            'prompt_tokens_cached_by_source_total{source="device"}': 8,
            'prompt_tokens_cached_by_source_total{source="host"}': 0,
            "generation_tokens_total": 5,
            'request_success_total{finished_reason="length"}': 2,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
        },
    )
    assert load.histogram("iteration_tokens_total") == (5, 10 + 1 + 1 + 2 + 1)
    assert load.histogram("request_prompt_tokens") == (2, 20)
    assert load.histogram("request_generation_tokens") == (2, 5)
    assert load.histogram("request_params_max_tokens") == (2, 5)
    assert load.histogram("request_prefill_kv_computed_tokens") == (2, 12)
    assert load.histogram("request_params_n") == (2, 2)
    assert load.histogram("request_num_preemptions") == (2, 0)


@pytest.mark.parametrize(("caching", "recomputed"), [(False, 9), (True, 5)])
def test_what_a_preempted_request_computes_again_is_not_counted_again(caching, recomputed):
    # Seven tokens each fill the four blocks; the third step needs a fifth, and takes b's.
    load = Workload(num_blocks=5, max_model_len=16, caching=caching)
    load.add("a", list(range(60, 67)), 6)
    load.add("b", list(range(70, 77)), 6)
    load.step(2)
    check(load.values(), {"num_requests_running": 2, "kv_cache_usage_perc": 1})
    load.step()
    check(
        load.values(),
        {
            "num_requests_running": 1,
            "num_requests_waiting": 1,
            'num_requests_waiting_by_reason{reason="capacity"}': 1,
            'num_requests_waiting_by_reason{reason="deferred"}': 0,
            "kv_cache_usage_perc": 0.75,
            "num_preemptions_total": 1,
            "paged:preemption_discarded_tokens_total": 8,
        },
    )
    # a goes on alone until its sixth token, in step 6; then b computes its nine tokens, of which
    # one block may still be cached, and has its sixth in step 10.
    load.run()
    check(
        load.values(),
        {
            "num_preemptions_total": 1,
            "prompt_tokens_total": 14,
            "prompt_tokens_cached_total": 0,
            'prompt_tokens_by_source_total{source="local_compute"}': 14,
            "prefix_cache_queries_total": 14 if caching else 0,
            "prefix_cache_hits_total": 0,
            "generation_tokens_total": 12,
        },
    )
    assert load.histogram("iteration_tokens_total") == (10, 14 + 2 + 4 + recomputed + 3)
    assert load.histogram("request_num_preemptions") == (2, 1)
    assert load.histogram("request_prefill_kv_computed_tokens") == (2, 14)
    assert load.histogram("time_to_first_token_seconds") == (2, 0.5)
    # Five gaps each; one of b's spans the five steps without it.
    assert load.histogram("inter_token_latency_seconds") == (10, 9 * 0.25 + 5 * 0.25)
    assert load.histogram("request_decode_time_seconds") == (2, 1.25 + 2.25)


def test_samples_of_one_prompt():
    # The first computes six tokens, the others find their first block among these.
    load = Workload()
    load.add("a", TEN_TOKENS[:6], 4, n=3)
    load.step()
    check(load.values(), {"num_requests_running": 3})
    load.run()
    check(
        load.values(),
        {
            "prompt_tokens_total": 18,
            "prompt_tokens_cached_total": 8,
            "prefix_cache_queries_total": 18,
            "prefix_cache_hits_total": 8,
            "generation_tokens_total": 12,
            'request_success_total{finished_reason="length"}': 3,
        },
    )
    assert load.histogram("iteration_tokens_total") == (4, 10 + 3 * 3)
    assert load.histogram("request_params_n") == (1, 3)
    assert load.histogram("request_generation_tokens") == (3, 12)
    assert load.histogram("time_to_first_token_seconds") == (3, 0.75)


def test_prompt_in_parts_counts_with_its_first_token():
    load = Workload(budget=32)
    load.add("a", [50 + i % 40 for i in range(80)], 2)
    load.step(2)
    check(load.values(), {"prompt_tokens_total": 0, "generation_tokens_total": 0})
    assert load.histogram("iteration_tokens_total") == (2, 64)
    load.run()
    check(load.values(), {"prompt_tokens_total": 80, "generation_tokens_total": 2})
    assert load.histogram("iteration_tokens_total") == (4, 81)
    assert load.histogram("time_to_first_token_seconds") == (1, 0.75)
    assert load.histogram("request_prefill_time_seconds") == (1, 0.75)


def test_aborted_requests():
    # One runs and has two of its tokens, the other has not been looked at.
    load = Workload(max_num_seqs=1)
    load.add("a", TEN_TOKENS, 50)
    load.add("b", TEN_TOKENS, 50)
    load.step(2)
    check(load.values(), {"num_requests_running": 1, "num_requests_waiting": 1})
    load.abort("a", "b", "nobody")
    check(
        load.values(),
        {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
            'request_success_total{finished_reason="abort"}': 2,
            'request_success_total{finished_reason="length"}': 0,
            "prompt_tokens_total": 10,
            "generation_tokens_total": 2,
        },
    )
    assert load.histogram("request_generation_tokens") == (2, 2)
    assert load.histogram("e2e_request_latency_seconds") == (2, 1.0)
    assert load.histogram("request_decode_time_seconds") == (2, 0.25)


def test_prefix_that_was_evicted_before_it_is_asked_for_again():
    # b needs all four blocks, and takes a's two full ones.
    load = Workload(num_blocks=5, max_model_len=16)
    for name, prompt in (("a", TEN_TOKENS[:9]), ("b", list(range(80, 93))), ("c", TEN_TOKENS[:9])):
        load.add(name, prompt, 1)
        load.run()
    check(
        load.values(),
        {
            "prefix_cache_queries_total": 31,
            "prefix_cache_hits_total": 0,
            "paged:prefix_cache_evicted_queries_total": 8,
        },
    )


def test_prefix_that_comes_back_from_host_memory():
    # b needs all four blocks; a's two full ones go to the host, and come back for c.
    tiers = WaitableTiers(capacity=8, delays=[0], losses=[0], largest_load=8)
    load = Workload(num_blocks=5, max_model_len=16, tiers=tiers)
    load.add("a", TEN_TOKENS[:9], 1)
    load.run()
    load.add("b", list(range(80, 93)), 1)
    load.run()
    load.add("c", TEN_TOKENS[:9], 1)
    load.step()
    check(
        load.values(),
        {
            "num_requests_waiting": 1,
            'num_requests_waiting_by_reason{reason="capacity"}': 0,
            'num_requests_waiting_by_reason{reason="deferred"}': 1,
        },
    )
    load.run()
    check(
        load.values(),
        {
            "prefix_cache_queries_total": 31,
            "prefix_cache_hits_total": 0,
            "external_prefix_cache_queries_total": 31,
            "external_prefix_cache_hits_total": 8,
            'paged:external_prefix_cache_hits_by_medium_total{medium="host"}': 8,
            "prompt_tokens_total": 31,
            "prompt_tokens_cached_total": 8,
            'prompt_tokens_by_source_total{source="local_compute"}': 23,
            'prompt_tokens_by_source_total{source="local_cache_hit"}': 0,
            'prompt_tokens_by_source_total{source="external_kv_transfer"}': 8,
            'prompt_tokens_cached_by_source_total{source="device"}': 0,
            'prompt_tokens_cached_by_source_total{source="host"}': 8,
        },
    )
    assert load.histogram("request_prefill_kv_computed_tokens") == (3, 23)


def test_request_that_its_grammar_leaves_without_a_token_fails_alone():
    load = Workload()
    load.add("a", TEN_TOKENS, 5, constraint=TwoTokens())
    load.add("b", list(range(80, 90)), 5)
    load.run()
    check(
        load.values(),
        {
            'request_success_total{finished_reason="error"}': 1,
            'request_success_total{finished_reason="length"}': 1,
            "generation_tokens_total": 2 + 5,
        },
    )
    assert load.histogram("request_generation_tokens") == (2, 2 + 5)
    # It ends in the step of its third token.
    assert load.histogram("e2e_request_latency_seconds") == (2, 0.75 + 1.25)


def test_requests_that_end_with_the_engine_are_errors():
    metrics = EngineMetrics("m", 128, {})

    async def scenario(engine):
        engine.add_stats_listener(metrics.observe)
        # Five steps are run: the prompt's, and four of one token. The sixth fails.
        streams = [engine.generate(TEN_TOKENS, SamplingParams(max_tokens=50)) for _ in range(2)]
        results = await asyncio.gather(*map(anext_all, streams), return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 2

    async def anext_all(stream):
        async for _ in stream:
            pass

    serve(scenario, script=endless, fail_at=5)
    success = 'vllm:request_success_total{engine="0",finished_reason="%s",model_name="m"} %.1f'
    page = metrics.render().decode()
    assert success % ("error", 2) in page
    assert success % ("abort", 0) in page


def test_step_that_is_finished_before_its_time_is_counted():
    # Planned ahead: call i runs step i + 1 and takes in step i. The reset takes in step 2 (a token
    # of a, and b's prompt), and preempts both; then they compute 11 and 11 tokens again.
    load = Workload(async_scheduling=True, caching=False)
    load.add("a", TEN_TOKENS, 4)
    load.step()
    load.add("b", list(range(80, 90)), 2)
    load.step()
    assert load.histogram("iteration_tokens_total") == (1, 10)
    load.engine.reset_prefix_cache(reset_running_requests=True)
    load.run()
    # Steps 1 and 2, the recomputation with the next token, after which b is done, and a's last.
    assert load.histogram("iteration_tokens_total") == (4, 10 + 11 + (12 + 11) + 1)
    check(
        load.values(),
        {
            "generation_tokens_total": 6,
            "prompt_tokens_total": 20,
            "num_preemptions_total": 2,
            "paged:preemption_discarded_tokens_total": 11 + 10,
        },
    )
    assert load.histogram("request_num_preemptions") == (2, 2)


def test_stays_of_blocks_and_work_of_steps():
    # a takes three of four blocks at 100 and ends at 100.25; b finds its two full ones at 101, and
    # adds one. c needs all four, at 104: two of the first three, whose last use was b's, as well as
    # the one that a has left behind, and which was b's third from 101 on.
    load = Workload(num_blocks=5, max_model_len=16)
    for now, name, prompt in (
        (100, "a", TEN_TOKENS[:9]),
        (101, "b", TEN_TOKENS[:9]),
        (104, "c", list(range(80, 93))),
    ):
        load.clock.now = now
        load.add(name, prompt, 1)
        load.run()
    check(
        load.values(),
        {
            "estimated_flops_per_gpu_total": 100 * (9 + 1 + 13),
            "estimated_read_bytes_per_gpu_total": 3 * 10,
            "estimated_write_bytes_per_gpu_total": 9 + 1 + 13,
        },
    )
    # The third block of a was b's, too: blank blocks are handed out again at once.
    assert load.histogram("kv_block_lifetime_seconds") == (4, 1.0 + 4.0 + 4.0 + 3.0)
    assert load.histogram("kv_block_idle_before_evict_seconds") == (4, 1.0 + 3.0 + 3.0 + 3.0)
    assert load.histogram("kv_block_reuse_gap_seconds") == (0, 0)
