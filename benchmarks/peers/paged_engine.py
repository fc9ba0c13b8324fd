"""This engine in a process of its own, as its peers are."""

import time

from benchmarks.peers.protocol import Engine, Job, Outcome, Settings, decode_step_seconds, serve
from paged.scheduler.config import EngineConfig
from paged.scheduler.params import SamplingParams


class PagedEngine:
    """`Engine` with the weights in bfloat16; `options` are fields of `EngineConfig`."""

    def __init__(self, settings: Settings) -> None:
        from paged.scheduler.loading import load_engine

        config = EngineConfig(
            dtype="bfloat16", max_model_len=settings.max_model_len, **settings.options
        )
        self._engine = load_engine(settings.model, config, progress=False).engine

    def run(self, job: Job) -> Outcome:
        params = SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True)
        tokens: dict[str, list[int]] = {}
        arrivals: dict[str, list[float]] = {}
        start = time.perf_counter()
        for number, prompt in enumerate(job.prompts):
            self._engine.add_request(str(number), prompt, params)
            tokens[str(number)], arrivals[str(number)] = [], []
        while self._engine.has_unfinished:
            outputs, _ = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                tokens[output.request_id] += output.outputs[0].token_ids
                arrivals[output.request_id].append(now)
        return Outcome(
            max(times[-1] for times in arrivals.values()) - start,
            [len(ids) for ids in tokens.values()],
            [ids[0] for ids in tokens.values()],
            decode_step_seconds(arrivals.values()),
        )


def load(settings: Settings) -> Engine:
    return PagedEngine(settings)


if __name__ == "__main__":
    serve(load, "jax", "jaxlib", "numpy")
