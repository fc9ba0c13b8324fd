"""llama.cpp in a process of its own, through llama-cpp-python; one prompt per job."""

import time

from benchmarks.peers.protocol import Engine, Job, Outcome, Settings, decode_step_seconds, serve


class LlamaCppEngine:
    """`llama_cpp.Llama` on a GGUF file."""

    def __init__(self, settings: Settings) -> None:
        from llama_cpp import Llama

        self._llama = Llama(
            settings.model,
            n_ctx=settings.max_model_len,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            verbose=False,
        )

    def run(self, job: Job) -> Outcome:
        if len(job.prompts) != 1:
            raise ValueError("llama-cpp-python decodes one prompt at a time; give it one.")
        tokens: list[int] = []
        arrivals: list[float] = []
        start = time.perf_counter()
        # It goes on for ever: the end of a text is a token like others here.
        for token in self._llama.generate(job.prompts[0], temp=0.0, repeat_penalty=1.0):
            arrivals.append(time.perf_counter())
            tokens.append(token)
            if len(tokens) == job.output_len:
                break
        seconds = arrivals[-1] - start
        step_seconds = decode_step_seconds([arrivals])
        return Outcome(seconds, [len(tokens)], tokens[:1], step_seconds)


def load(settings: Settings) -> Engine:
    return LlamaCppEngine(settings)


if __name__ == "__main__":
    serve(load, "llama-cpp-python")
