"""transformers' `generate` in a process of its own; runs in the environment made for vLLM."""

import time

from benchmarks.peers.protocol import Engine, Job, Outcome, Settings, serve


class TransformersEngine:
    """`AutoModelForCausalLM` in bfloat16; a job is one batch of prompts of one length.

    How many threads it has is said by `OMP_NUM_THREADS`.
    """

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype="bfloat16").eval()

    def run(self, job: Job) -> Outcome:
        from transformers import BatchEncoding

        mask = [[1] * len(prompt) for prompt in job.prompts]
        lists = {"input_ids": job.prompts, "attention_mask": mask}
        start = time.perf_counter()
        output = self._model.generate(
            **BatchEncoding(lists, tensor_type="pt"),
            do_sample=False,
            # Not stopped at the end of a text: that token is never the best one.
            min_new_tokens=job.output_len,
            max_new_tokens=job.output_len,
            pad_token_id=0,
        )
        tokens = output[:, len(job.prompts[0]) :].tolist()
        seconds = time.perf_counter() - start
        return Outcome(seconds, [len(ids) for ids in tokens], [ids[0] for ids in tokens])


def load(settings: Settings) -> Engine:
    return TransformersEngine(settings)


if __name__ == "__main__":
    serve(load, "transformers", "torch")
