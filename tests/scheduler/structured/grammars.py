"""Grammars over bytes: the tiny tokenizer's tokens are bytes, but for <pad>, <bos> and <eos>."""

import numpy as np

from paged.models.sampling import mask_words
from paged.models.tokenizer import Tokenizer
from paged.scheduler.structured.compiler import GrammarCompiler
from paged.scheduler.structured.config import StructuredOutputsConfig
from paged.scheduler.structured.grammar_constraint import MaskFiller
from paged.scheduler.structured.params import StructuredOutputs
from tests.scheduler.fakes import TINY_TOKENIZER, VOCAB_SIZE

EOS = 2


def make_compiler(**settings) -> GrammarCompiler:
    return GrammarCompiler.of_model(
        Tokenizer.from_directory(TINY_TOKENIZER),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[],
        config=StructuredOutputsConfig(**settings),
    )


def constraint(compiler: GrammarCompiler, *, jumps: bool = False, **fields):
    return compiler.compile(StructuredOutputs(**fields)).start(jumps=jumps)


def accepts(compiler: GrammarCompiler, text: str, **fields) -> bool:
    """Whether all of a text, and its end, are allowed."""
    state = constraint(compiler, **fields)
    return all(state.accept(byte) for byte in text.encode()) and (
        state.is_over or EOS in allowed(state)
    )


def allowed(*states) -> set[int]:
    """The tokens that the masks of these states allow; all must agree."""
    masks = np.full((len(states), mask_words(VOCAB_SIZE)), -1, np.int32)
    MaskFiller().fill([(state, row) for row, state in enumerate(states)], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert (bits == bits[0]).all()
    return set(np.flatnonzero(bits[0]).tolist())
