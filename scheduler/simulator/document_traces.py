"""Traces of whole documents read again and again: the textbook patterns of cache research.

All documents have the same length and share nothing; each request is one document and generates
`output_tokens` tokens. The defaults are those of the comparison in docs/simulator.md: documents of
5,033 tokens, 314 full blocks of 16 each.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from paged.scheduler.simulator.trace import Trace, TraceRequest

DOCUMENT_TOKENS = 5033
PASS_ORDERS = ("forward", "reverse")


def cyclic(
    documents: int = 10,
    document_tokens: int = DOCUMENT_TOKENS,
    passes: Sequence[str] | int = ("forward", "forward", "reverse"),
    output_tokens: int = 1,
) -> Trace:
    """Return all documents in order, or in reverse, once per pass; a number means so many forward.

    Raises: ValueError if a pass is neither "forward" nor "reverse".
    """
    orders = ("forward",) * passes if isinstance(passes, int) else tuple(passes)
    for name in orders:
        if name not in PASS_ORDERS:
            raise ValueError(f"passes has {name!r}; each must be one of {', '.join(PASS_ORDERS)}.")

    def order() -> Iterator[tuple[str, int]]:
        for index, name in enumerate(orders):
            forward = range(documents)
            for document in forward if name == "forward" else reversed(forward):
                yield f"doc-{document}", index

    return _documents("cyclic", order, documents * len(orders), document_tokens, output_tokens)


def sawtooth(
    documents: int = 10,
    document_tokens: int = DOCUMENT_TOKENS,
    passes: int = 20,
    output_tokens: int = 1,
) -> Trace:
    """Return all documents forward, then backward, and so on."""
    orders = [PASS_ORDERS[index % 2] for index in range(passes)]
    trace = cyclic(documents, document_tokens, orders, output_tokens)
    trace.name = "sawtooth"
    return trace


def zipf(
    documents: int = 40,
    document_tokens: int = DOCUMENT_TOKENS,
    num_requests: int = 200,
    exponent: float = 1.0,
    output_tokens: int = 1,
    seed: int = 0,
) -> Trace:
    """Return independent draws in which the k-th document has a weight of k ** -exponent."""
    weights = np.arange(1, documents + 1) ** -float(exponent)
    weights /= weights.sum()

    def order() -> Iterator[tuple[str, int]]:
        rng = np.random.default_rng(seed)
        for start in range(0, num_requests, 1024):
            draws = rng.choice(documents, size=1024, p=weights).tolist()
            for document in draws[: num_requests - start]:
                yield f"doc-{document}", 0

    return _documents("zipf", order, num_requests, document_tokens, output_tokens)


def scan(
    hot_documents: int = 2,
    hot_share: float = 0.5,
    document_tokens: int = DOCUMENT_TOKENS,
    num_requests: int = 200,
    output_tokens: int = 1,
    seed: int = 0,
) -> Trace:
    """Return draws of which `hot_share` ask for a hot document and all others for a new one.

    Raises: ValueError if the share is not in 0 to 1.
    """
    if not 0 <= hot_share <= 1:
        raise ValueError(f"hot_share={hot_share} must be in 0 to 1.")

    def order() -> Iterator[tuple[str, int]]:
        rng = np.random.default_rng(seed)
        for index in range(num_requests):
            is_hot = rng.random() < hot_share
            yield f"hot-{rng.integers(hot_documents)}" if is_hot else f"once-{index}", 0

    return _documents("scan", order, num_requests, document_tokens, output_tokens)


def working_set(
    size: int = 4,
    requests_per_set: int = 40,
    document_tokens: int = DOCUMENT_TOKENS,
    num_requests: int = 200,
    output_tokens: int = 1,
    seed: int = 0,
) -> Trace:
    """Return draws from a set of `size` documents that is replaced as a whole now and then."""

    def order() -> Iterator[tuple[str, int]]:
        rng = np.random.default_rng(seed)
        for index in range(num_requests):
            which = index // requests_per_set
            # A set starts with each of its documents once, so that it is a set of that size.
            place = index % requests_per_set
            document = place if place < size else int(rng.integers(size))
            yield f"set-{which}-{document}", 0

    return _documents("working-set", order, num_requests, document_tokens, output_tokens)


def _documents(
    name: str,
    order: Callable[[], Iterator[tuple[str, int]]],
    num_requests: int,
    document_tokens: int,
    output_tokens: int,
) -> Trace:
    """Return the trace of these (document, pass) pairs.

    Raises: ValueError if a length or a count is below 1.
    """
    for what, value in (
        ("num_requests", num_requests),
        ("document_tokens", document_tokens),
        ("output_tokens", output_tokens),
    ):
        if value < 1:
            raise ValueError(f"{what}={value} of the trace {name!r} must be at least 1.")

    def generate() -> Iterator[TraceRequest]:
        for document, pass_index in order():
            yield TraceRequest(((document, document_tokens),), output_tokens, pass_index=pass_index)

    return Trace(name, generate, num_requests)
