"""`BatchHistogram` shows what the library's own histogram shows."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from paged.server.batch_histogram import BatchHistogram

NAME, TEXT, BUCKETS = "vllm:gap_seconds", "Gap between two tokens.", (0.01, 0.025, 0.5, 1, 80)
# Values on the bounds, between them and past the last one, some of them many times.
VALUES = st.sampled_from([0.0, 0.01, 0.010001, 0.025, 0.3, 1, 79.5, 80, 1e6]) | st.floats(0, 100)


@given(batches=st.lists(st.lists(VALUES, max_size=20), max_size=4))
@example(batches=[])
@settings(max_examples=50)
def test_it_renders_what_the_library_renders(batches: list[list[float]]):
    disable_created_metrics()
    labels = {"model_name": 'a "b"', "engine": "0"}
    expected, got = CollectorRegistry(), CollectorRegistry()
    theirs = Histogram(NAME, TEXT, tuple(labels), buckets=BUCKETS, registry=expected)
    ours = BatchHistogram(NAME, TEXT, labels, buckets=BUCKETS, registry=got)
    series = theirs.labels(*labels.values())
    for batch in batches:
        ours.observe_all(batch)
        for value in batch:
            series.observe(value)
    assert same_but_for_rounding(generate_latest(got), generate_latest(expected))


def same_but_for_rounding(a: bytes, b: bytes) -> bool:
    """Compare two pages; sums are added up in another order, so their last digits may differ."""
    lines = list(zip(a.decode().splitlines(), b.decode().splitlines(), strict=True))
    for ours, theirs in lines:
        if "_sum{" in ours:
            (name, x), (other, y) = ours.rsplit(" ", 1), theirs.rsplit(" ", 1)
            # 80 additions of doubles lose at most 80 units of the last of 53 bits.
            if name != other or abs(float(x) - float(y)) > 1e-13 * float(y):
                return False
        elif ours != theirs:
            return False
    return True
