"""Outputs obey their constraints, whatever the model says and however they are scheduled.

Validity is judged by `jsonschema` and `re`, which know nothing of how it was achieved.
"""

import asyncio
import datetime
import json
import math
import random
import re
from collections.abc import Callable, Sequence

import jsonschema
import pytest

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.engine import Engine
from paged.scheduler.output import CompletionOutput
from paged.scheduler.params import ParameterError, SamplingParams
from paged.scheduler.structured.params import StructuredOutputs
from tests.e2e.random_schemas import random_schema

PROMPT = list(b"Say it in JSON.")
ASK = "Describe a cat in JSON:\n"
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


@FORMATS.checks("time", raises=ValueError)
def _is_time(text: object) -> bool:
    return not isinstance(text, str) or datetime.time.fromisoformat(text).tzinfo is not None


@FORMATS.checks("date-time", raises=ValueError)
def _is_moment(text: object) -> bool:
    return not isinstance(text, str) or datetime.datetime.fromisoformat(text).tzinfo is not None


@FORMATS.checks("duration")
def _is_duration(text: object) -> bool:
    """RFC 3339, appendix A: of consecutive units the first that is given begins."""
    time = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
    date = r"(\d+D|\d+M(\d+D)?|\d+Y(\d+M(\d+D)?)?)"
    return not isinstance(text, str) or bool(re.fullmatch(rf"P({date}({time})?|{time}|\d+W)", text))


@FORMATS.checks("hostname")
def _is_hostname(text: object) -> bool:
    label = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    return not isinstance(text, str) or bool(re.fullmatch(rf"{label}(\.{label})*", text))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "identification": {"type": "integer", "minimum": 0, "maximum": 999},
        "colour": {"enum": ["vermilion", "ultramarine"]},
    },
    "required": ["name", "identification", "colour"],
    "additionalProperties": False,
}


def run_all(
    engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]], *, stream: bool = True
) -> list[list[CompletionOutput]]:
    """Run requests together; return the samples of each, joined."""
    joined: dict[tuple[int, int], CompletionOutput] = {}
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params, stream=stream)
    while engine.has_unfinished:
        for output in engine.step()[0]:
            for new in output.outputs:
                key = int(output.request_id), new.index
                if key in joined:
                    old = joined[key]
                    new.text = old.text + new.text
                    new.token_ids = old.token_ids + new.token_ids
                    new.logprobs = (old.logprobs or ()) + (new.logprobs or ())
                joined[key] = new
    counts = [params.n for _, params in requests]
    return [[joined[i, j] for j in range(count)] for i, count in enumerate(counts)]


def hot(seed: int = 0, **fields) -> SamplingParams:
    fields = {"temperature": 1.5, "max_tokens": 200, "seed": seed, **fields}
    return SamplingParams(**fields)


def check(schema: dict, output: CompletionOutput) -> bool:
    """Check an output against its schema; return whether it was completed."""
    assert output.finish_reason in ("stop", "length"), output
    if output.finish_reason == "length":
        return False
    value = json.loads(output.text)
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)
    return True


def count_valid(engine: Engine, prompt: Sequence[int], num_schemas: int, num_tokens: int) -> int:
    """Generate for random schemas, check each output, return how many were completed."""
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    requests = []
    for seed, schema in enumerate(schemas):
        jsonschema.Draft202012Validator.check_schema(schema)
        wanted = StructuredOutputs(json=schema)
        requests.append((prompt, hot(seed, max_tokens=num_tokens, structured_outputs=wanted)))
    outputs = run_all(engine, requests)
    return sum(check(schema, samples[0]) for schema, samples in zip(schemas, outputs, strict=True))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_random_schemas(make_tiny: Callable[..., Engine], async_scheduling: bool):
    engine = make_tiny(async_scheduling=async_scheduling)
    assert count_valid(engine, PROMPT, 40, 230) > 30


@pytest.mark.slow
def test_five_hundred_random_schemas(make_tiny: Callable[..., Engine]):
    completed = count_valid(make_tiny(), PROMPT, 500, 230)
    print(f"{completed} of 500 were completed, and are valid.")
    assert completed > 400


@pytest.mark.slow
def test_five_hundred_random_schemas_with_a_real_model(make_engine: Callable[..., Engine]):
    engine = make_engine()
    prompt = engine.tokenizer.encode(ASK)
    completed = count_valid(engine, prompt, 500, 300)
    print(f"{completed} of 500 were completed, and are valid.")
    assert completed > 450


PAIRS = [a + b for a in "XYZ !" for b in "ABCDEFGHIJKL"]

MIXED: list[tuple[str, dict]] = [
    ("json", {"structured_outputs": StructuredOutputs(json=PERSON), "n": 3}),
    ("greedy", {"structured_outputs": StructuredOutputs(json=PERSON), "temperature": 0}),
    ("unconstrained", {"max_tokens": 40}),
    ("greedy unconstrained", {"temperature": 0, "max_tokens": 40}),
    ("logprobs", {"structured_outputs": StructuredOutputs(json=PERSON), "logprobs": 2}),
    ("short", {"structured_outputs": StructuredOutputs(json=PERSON), "max_tokens": 13}),
    ("stop string", {"structured_outputs": StructuredOutputs(json=PERSON), "stop": ["ific"]}),
    (
        "everything else",
        {
            "structured_outputs": StructuredOutputs(json=PERSON),
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "top_k": 20,
            "top_p": 0.9,
            "min_tokens": 5,
            "logit_bias": {ord("a"): 3.0},
            "ignore_eos": True,
        },
    ),
    (
        "many edits",
        {
            "allowed_token_ids": range(32, 120),
            "logit_bias": {i: 2.0 for i in range(100, 180)},
            "bad_words": PAIRS,
            "repetition_penalty": 1.3,
            "max_tokens": 40,
            "n": 2,
        },
    ),
    (
        "many edits and a schema",
        {
            "structured_outputs": StructuredOutputs(json=PERSON),
            "logit_bias": dict.fromkeys(range(97, 123), -4.0),
            "bad_words": PAIRS,
            "stop_token_ids": range(245, 256),
            "min_tokens": 3,
        },
    ),
    ("regex", {"structured_outputs": StructuredOutputs(regex=r"(ab|cd){3,9}!")}),
    ("choice", {"structured_outputs": StructuredOutputs(choice=["yes", "yes, but"]), "n": 4}),
]


@pytest.mark.parametrize("num_blocks", [65, 40])  # the fewer make it preempt
def test_constraints_go_with_everything_else(make_tiny: Callable[..., Engine], num_blocks: int):
    """Streamed or not, planned ahead or not, preempted or not: the same tokens."""
    requests = [(PROMPT, hot(number, **fields)) for number, (_, fields) in enumerate(MIXED)]
    runs = [
        run_all(make_tiny(num_blocks=num_blocks, async_scheduling=ahead), requests, stream=stream)
        for ahead, stream in ((False, True), (True, True), (True, False))
    ]
    for others in runs[1:]:
        for (name, _), samples, expected in zip(MIXED, others, runs[0], strict=True):
            assert [s.token_ids for s in samples] == [s.token_ids for s in expected], name
            assert [s.text for s in samples] == [s.text for s in expected], name
    by_name = dict(zip([name for name, _ in MIXED], runs[0], strict=True))
    for name in ("json", "greedy", "logprobs", "everything else", "many edits and a schema"):
        assert all(check(PERSON, sample) for sample in by_name[name]), by_name[name]
    for sample in by_name["many edits"]:
        assert set(sample.token_ids) <= set(range(32, 120))
    for sample in by_name["many edits"] + by_name["many edits and a schema"]:
        assert not [pair for pair in PAIRS if pair in sample.text]
    (short,) = by_name["short"]
    assert (short.finish_reason, len(short.token_ids)) == ("length", 13)
    (stopped,) = by_name["stop string"]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "ific")
    assert re.fullmatch(r'\{"name":".{1,8}","ident', stopped.text)
    assert re.fullmatch("(ab|cd){3,9}!", by_name["regex"][0].text)
    assert {sample.text for sample in by_name["choice"]} <= {"yes", "yes, but"}
    (logged,) = by_name["logprobs"]
    assert len(logged.logprobs) == len(logged.token_ids)
    # Of the tokens that are allowed: the first is certain.
    assert next(iter(logged.logprobs[0].values())).logprob == 0.0


def test_named_tokens_are_scored_among_those_that_are_allowed(make_tiny: Callable[..., Engine]):
    """As the likeliest ones are, which another program reports."""
    wanted, named = StructuredOutputs(regex="[ab]{4}x"), list(b"abxq")
    fields = {"structured_outputs": wanted, "temperature": 0}
    requests = [
        (PROMPT, hot(logprobs=20, **fields)),
        (PROMPT, hot(logprobs=0, logprob_token_ids=named, prompt_logprobs=0, **fields)),
        (PROMPT, hot(logprobs=20, temperature=0, max_tokens=5, ignore_eos=True)),
        (PROMPT, hot(logprobs=0, logprob_token_ids=named, max_tokens=1, temperature=0)),
    ]
    ((likeliest,), (scored,), _, (free,)) = run_all(make_tiny(), requests)
    assert re.fullmatch("[ab]{4}x", scored.text)
    assert likeliest.token_ids == scored.token_ids
    for expected, found in list(zip(likeliest.logprobs, scored.logprobs, strict=True))[:5]:
        for token_id in named:
            if token_id in expected and expected[token_id].logprob > -math.inf:
                assert found[token_id].logprob == pytest.approx(
                    expected[token_id].logprob, abs=1e-4
                )
            else:
                assert found[token_id].logprob == -math.inf
    first = scored.logprobs[0]
    assert sum(math.exp(first[token_id].logprob) for token_id in named) == pytest.approx(1)
    assert sum(math.exp(free.logprobs[0][token_id].logprob) for token_id in named) < 0.9


def test_what_has_no_alternative_is_not_waited_for(make_tiny: Callable[..., Engine]):
    """The names of properties are computed in one step each, and counted as output."""
    engine = make_tiny(async_scheduling=False)
    steps, tokens = 0, 0
    engine.add_request("a", PROMPT, hot(structured_outputs=StructuredOutputs(json=PERSON)))
    output = None
    while engine.has_unfinished:
        (output,), stats = engine.step()
        tokens += stats.num_generation_tokens
        steps += 1
    assert output.finished
    (finished,) = stats.finished
    assert finished.num_generation_tokens == tokens
    assert steps < tokens / 2


def test_a_constraint_that_other_parameters_contradict_is_an_error(make_tiny):
    wanted = StructuredOutputs(choice=["yes", "no"])
    ((sample,), (other,)) = run_all(
        make_tiny(),
        [
            (PROMPT, hot(structured_outputs=wanted, allowed_token_ids=[ord("x")])),
            (PROMPT, hot(structured_outputs=wanted)),
        ],
    )
    assert (sample.finish_reason, sample.text, sample.token_ids) == ("error", "", ())
    assert "doesn't satisfy the grammar" in sample.stop_reason
    assert other.text in ("yes", "no")


def test_an_engine_without_a_compiler_refuses(make_tiny):
    engine = make_tiny(has_grammars=False)
    with pytest.raises(ParameterError, match="structured_outputs needs an engine with grammars"):
        engine.add_request("a", PROMPT, hot(structured_outputs=StructuredOutputs(regex="a")))


def test_a_bad_grammar_harms_nobody(tiny_model, tiny_config):
    """Over the event loop: refused before the first token, while others go on."""

    async def text_of(engine: AsyncEngine, wanted: StructuredOutputs) -> str:
        parts = [
            output.outputs[0].text
            async for output in engine.generate(PROMPT, hot(structured_outputs=wanted))
        ]
        return "".join(parts)

    async def aborted(engine: AsyncEngine) -> str | None:
        stream = engine.generate(
            PROMPT, hot(structured_outputs=StructuredOutputs(regex="[a-z]+")), request_id="gone"
        )
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)  # it waits for its grammar
        engine.abort("gone")
        outputs = [await first, *[output async for output in stream]]
        return outputs[-1].outputs[0].finish_reason

    async def run() -> None:
        engine = await AsyncEngine.create(str(tiny_model), tiny_config, progress=False)
        bad = [StructuredOutputs(regex=f"(a{i}") for i in range(20)]
        good = [StructuredOutputs(regex=f"a{i}b{{3}}") for i in range(20)]
        results = await asyncio.gather(
            *(text_of(engine, wanted) for wanted in (*bad, *good)), return_exceptions=True
        )
        assert all(isinstance(error, ParameterError) for error in results[:20])
        assert results[20:] == [f"a{i}bbb" for i in range(20)]
        assert await aborted(engine) == "abort"
        assert engine.num_unfinished == 0
        await engine.shutdown()

    asyncio.run(run())
