"""Grammars: what they accept, what is refused, and that compiling one harms nobody else."""

import asyncio
import threading
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from paged.models.sampling import mask_words
from paged.models.tokenizer import Tokenizer
from paged.scheduler.errors import QueueFullError
from paged.scheduler.params import ParameterError
from paged.scheduler.structured.compiler import GrammarCompiler
from paged.scheduler.structured.config import StructuredOutputsConfig
from paged.scheduler.structured.params import StructuredOutputs
from tests.scheduler.fakes import TINY_TOKENIZER, VOCAB_SIZE
from tests.scheduler.structured.grammars import EOS, accepts, allowed, constraint

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


OTHER = {"type": "object", "properties": {"more": {"type": "boolean"}}}
BOTH = '{"more":true,"name":"x","age":3}'


@pytest.mark.parametrize(
    ("fields", "text", "expected"),
    [
        ({"json": SCHEMA}, '{"name":"x","age":3}', True),
        ({"json": SCHEMA}, '{"name": "x", "age": 3}', False),
        ({"json": SCHEMA, "disable_any_whitespace": False}, '{ "name": "x",\n"age": 3}', True),
        ({"json": SCHEMA, "whitespace_pattern": "[ ]?"}, '{"name": "x", "age":3}', True),
        ({"json": SCHEMA, "whitespace_pattern": "[ ]?"}, '{"name":  "x","age":3}', False),
        ({"json": SCHEMA}, '{"age":3,"name":"x"}', False),  # the order of the schema
        ({"json": SCHEMA}, '{"name":"x","age":3,"more":1}', False),
        ({"json": {**SCHEMA, "additionalProperties": True}}, '{"name":"","age":3,"a":1}', True),
        (
            {"json": SCHEMA, "disable_additional_properties": False},
            '{"name":"x","age":3,"more":1}',
            True,
        ),
        ({"json": {"type": "object"}}, '{"more":1}', True),
        # Closed, these would allow nothing, or less than was meant.
        ({"json": {**SCHEMA, "required": ["more"]}}, '{"name":"x","more":1}', True),
        ({"json": {"allOf": [SCHEMA, OTHER]}}, '{"name":"x","age":3,"more":true}', True),
        ({"json": {**OTHER, "$ref": "#/$defs/a", "$defs": {"a": SCHEMA}}}, BOTH, True),
        ({"json": {"anyOf": [SCHEMA, OTHER]}}, '{"more":true}', True),
        ({"json": {"anyOf": [SCHEMA, OTHER]}}, '{"more":true,"name":1}', False),
        ({"json": True}, "[1,null]", True),
        ({"json": {"type": "string", "x-guidance": {"whitespace_pattern": "!"}}}, '!"a"', False),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}}, "1", True),
        ({"json_object": True}, '{"a":[1,{}]}', True),
        ({"json_object": True}, "[1]", False),
        ({"regex": r"[a-c]{2}|\d"}, "ab", True),
        ({"regex": r"^[a-c]{2}|\d$"}, "7", True),
        ({"regex": r"[a-c]{2}"}, "abc", False),
        ({"regex": r"a\/b"}, "a/b", True),
        ({"choice": ["a", "ab"]}, "a", True),
        ({"choice": ["a", "ab"]}, "ab", True),
        ({"choice": ['say "hi"\n', "🌆 東京"]}, "🌆 東京", True),
        ({"choice": ['say "hi"\n', "🌆 東京"]}, 'say "hi"\n', True),
        ({"choice": ["<eos>"]}, "<eos>", True),
        ({"grammar": 'root ::= "(" d "+" d ")"\nd ::= [0-9]'}, "(1+2)", True),
        ({"grammar": 'start: "a" B\nB: /[0-9]+/'}, "a12", True),
    ],
)
def test_what_is_accepted(compiler, fields, text, expected):
    if text.isascii() or expected:
        assert accepts(compiler, text, **fields) is expected


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"regex": "(a"}, r"regex cannot be compiled: .*unclosed group"),
        ({"regex": r"(?=a)b"}, "look-around.* is not supported"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
        ({"json": {"type": "string", "format": "x"}}, "Unknown format: x"),
        ({"json": {"$ref": "https://example.com/a"}}, "not present in a registry"),
        ({"json": {"$ref": "#/nowhere"}}, "does not exist"),
        ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf constraints"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "Unimplemented keys"),
        ({"json": {"minimum": 2, "maximum": 1, "type": "integer"}}, "Unsatisfiable schema"),
        ({"json": False}, "allows no value at all"),
        ({"grammar": "root ::= x"}, "Rule 'x' not found"),
        ({"grammar": "root ::= " + "(" * 9000}, r"cannot be compiled: .*recursion|deeply"),
        ({"structural_tag": {"triggers": ["<"]}}, r'must be \{"triggers"'),
        ({"structural_tag": {"triggers": ["<"], "structures": [3]}}, "must have texts as `begin`"),
        (
            {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "a"}]}},
            "no trigger that 'a' begins with",
        ),
        (
            {
                "structural_tag": {
                    "triggers": ["<"],
                    "structures": [{"begin": "<", "schema": 3}],
                }
            },
            "structural_tag must be a JSON object",
        ),
    ],
)
def test_what_cannot_be_compiled_says_why(compiler, fields, match):
    with pytest.raises(ParameterError, match=match):
        compiler.compile(StructuredOutputs(**fields))


def nested(levels: int) -> dict:
    schema: dict = {"type": "null"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"json": nested(40)}, "json must not be nested deeper than 64 levels"),
        ({"json": {"enum": ["x" * 99] * 700}}, "must not have more than 65536 bytes"),
        ({"choice": ["x" * 70_000]}, "choice must not have more than 65536 bytes"),
        ({"regex": "x" * 70_000}, "regex must not have more than 65536 bytes"),
    ],
)
def test_what_is_too_large_is_refused_before_anything_is_done(compiler, fields, match):
    with pytest.raises(ParameterError, match=match):
        compiler.compile(StructuredOutputs(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": r"(a|b)*a(a|b){500}"},
        {"regex": r"((((a{1,100}){1,100}){1,100}){1,100})"},
        {"regex": r"(x+x+)+y"},
        {"regex": r"(a?){1000}a{1000}"},
        {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"}},
        {"grammar": 'start: s\ns: "a" | s s | s s s'},
        {"json": {"type": "array", "minItems": 10**7, "items": {"type": "string"}}},
    ],
)
def test_a_hostile_grammar_is_over_soon(compiler, fields):
    started = time.process_time()
    try:
        state = constraint(compiler, **fields)
        for _ in range(50):
            choices = sorted(allowed(state))
            if state.is_over or not choices or not state.accept(choices[-1]):
                break
    except ParameterError:
        pass
    assert time.process_time() - started < 5


def test_a_token_that_is_not_allowed_ends_a_constraint(compiler):
    state = constraint(compiler, regex="ab")
    assert state.accept(ord("a"))
    assert not state.accept(ord("x"))
    assert "doesn't satisfy the grammar" in state.error
    assert not state.is_over
    assert not state.accept(ord("b"))


def test_masks_of_several_samples_are_written_at_once(compiler):
    states = [constraint(compiler, regex="a[xyz]") for _ in range(3)]
    assert allowed(*states) == {ord("a")}
    for state in states:
        assert state.accept(ord("a"))
    assert allowed(*states) == {ord("x"), ord("y"), ord("z")}
    assert states[0].accept(ord("x"))
    assert states[0].is_over
    assert not states[1].is_over


def test_eos_is_allowed_where_the_grammar_accepts(compiler):
    state = constraint(compiler, regex="a+")
    assert EOS not in allowed(state)
    assert state.accept(ord("a"))
    assert allowed(state) == {ord("a"), EOS}
    assert not state.is_over
    assert state.accept(EOS)
    assert state.is_over


def test_forced_tokens_are_those_without_alternative(compiler):
    state = constraint(compiler, jumps=True, regex="abc(d|e)fgh")
    assert state.take_forced(0) == []
    assert bytes(state.take_forced(2)) == b"ab"
    assert bytes(state.take_forced(9)) == b"c"
    assert state.accept(ord("e"))
    assert bytes(state.take_forced(9)) == b"fgh"
    assert state.is_over
    assert state.take_forced(9) == []
    assert constraint(compiler, regex="abc").take_forced(9) == []  # does not jump


def test_a_grammar_is_compiled_once():
    made = []
    tokenizer = Tokenizer.from_directory(TINY_TOKENIZER)

    def make() -> LLTokenizer:
        made.append(LLTokenizer(tokenizer.backend.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS]))
        return made[0]

    compiler = GrammarCompiler(
        make, num_words=mask_words(VOCAB_SIZE), config=StructuredOutputsConfig(cache_size=2)
    )
    first = compiler.compile(StructuredOutputs(regex="a"))
    assert compiler.compile(StructuredOutputs(regex="a", source="guided_regex")) is first
    assert compiler.compile(StructuredOutputs(choice=["a"])) is not first
    assert compiler.compile(StructuredOutputs(regex="a")) is first
    compiler.compile(StructuredOutputs(regex="c"))  # drops the choice, used longest ago
    assert compiler.compile(StructuredOutputs(regex="a")) is first
    assert len(made) == 1
    compiler.close()


class Clock:
    """Seconds, which pass only when a test says so: a grammar has its time on any machine."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    async def run_out(self, work):
        """Let time pass until some work ends; return its result."""
        task = asyncio.ensure_future(work)
        while not task.done():
            self.now += 1
            await asyncio.sleep(0.01)
        return await task


def compiler_with(
    make_tokenizer=None, make_matcher=None, clock=time.monotonic, **settings
) -> GrammarCompiler:
    return GrammarCompiler(
        make_tokenizer or byte_tokenizer,
        num_words=mask_words(VOCAB_SIZE),
        config=StructuredOutputsConfig(**settings),
        make_matcher=make_matcher,
        clock=clock,
    )


def byte_tokenizer() -> LLTokenizer:
    text = Tokenizer.from_directory(TINY_TOKENIZER).backend.to_str()
    return LLTokenizer(text, n_vocab=VOCAB_SIZE, eos_token=[EOS])


def test_time_to_make_the_tokenizer_is_nobodys_fault():
    async def run() -> None:
        go, clock = threading.Event(), Clock()

        def make() -> LLTokenizer:
            assert go.wait(300)
            return byte_tokenizer()

        compiler = compiler_with(make, clock=clock, compile_timeout=2.0)
        compiler.start_loading()
        wanted = StructuredOutputs(json=SCHEMA)
        tasks = [asyncio.create_task(compiler.compile_async(wanted)) for _ in range(3)]
        await asyncio.sleep(0.05)
        clock.now = 100.0
        tasks[0].cancel()  # leaves the others what they wait for
        await asyncio.gather(tasks[0], return_exceptions=True)
        go.set()
        second, third = await asyncio.gather(*tasks[1:])
        assert second is third
        compiler.close()

    asyncio.run(run())


def test_a_tokenizer_that_cannot_be_read_refuses_all_grammars(caplog):
    def make() -> LLTokenizer:
        raise ValueError("what is this")

    compiler = compiler_with(make)
    compiler.wait_until_loaded()
    assert "Structured outputs are refused: what is this" in caplog.text
    with pytest.raises(ParameterError, match="does not work with this model's tokenizer: what is"):
        compiler.compile(StructuredOutputs(regex="a"))
    compiler.close()


def test_one_that_takes_long_harms_only_its_sender():
    go, clock = threading.Event(), Clock()
    started = threading.Semaphore(0)

    def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        if "slow" in grammar:
            started.release()
            assert go.wait(300)
        return LLMatcher(tokenizer, grammar)

    async def run() -> None:
        compiler = compiler_with(make_matcher=make_matcher, clock=clock, compile_timeout=0.3)
        compiler.wait_until_loaded()
        slow = asyncio.create_task(compiler.compile_async(StructuredOutputs(regex="slow")))
        assert await asyncio.to_thread(started.acquire, timeout=300)
        await compiler.compile_async(StructuredOutputs(regex="a"))  # the other thread has time
        with pytest.raises(ParameterError, match=r"regex must compile within 0\.3 seconds"):
            await clock.run_out(slow)
        with pytest.raises(ParameterError, match="must compile within"):  # it still runs
            await compiler.compile_async(StructuredOutputs(regex="slow"))

        too = asyncio.create_task(compiler.compile_async(StructuredOutputs(regex="slow too")))
        assert await asyncio.to_thread(started.acquire, timeout=300)
        with pytest.raises(QueueFullError, match=r"no turn within 0\.3 seconds; try again"):
            await clock.run_out(asyncio.to_thread(compiler.compile, StructuredOutputs(regex="b")))
        await asyncio.gather(too, return_exceptions=True)
        waiting = (
            compiler.compile_async(StructuredOutputs(regex=f"x{number}")) for number in range(300)
        )
        errors = await clock.run_out(asyncio.gather(*waiting, return_exceptions=True))
        assert "grammars wait to be compiled; try again" in str(errors[-1])
        assert {type(error) for error in errors} == {QueueFullError}
        go.set()
        compiler.close()

    asyncio.run(run())
