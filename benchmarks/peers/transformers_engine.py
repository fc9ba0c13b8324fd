"""transformers' `generate` in a process of its own; runs in the environment made for vLLM."""

import time

from benchmarks.peers.protocol import Engine, Job, Outcome, Settings, serve


class TransformersEngine:
    """`AutoModelForCausalLM` in bfloat16; a job is one batch of prompts of one length."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.threads)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.bfloat16)
        self._model = model.eval()

    def run(self, job: Job) -> Outcome:
        import torch

        input_ids = torch.tensor(job.prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                # Not stopped at the end of a text: that token is never the best one.
                min_new_tokens=job.output_len,
                max_new_tokens=job.output_len,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        tokens = output[:, input_ids.shape[1] :].tolist()
        return Outcome(seconds, [len(ids) for ids in tokens], [ids[0] for ids in tokens])


def load(settings: Settings) -> Engine:
    return TransformersEngine(settings)


if __name__ == "__main__":
    serve(load, "transformers", "torch")
