"""The rates of this CPU: what is counted, and that it is the product which is named."""

import pytest

from paged.native.library import load_library
from paged.scheduler.config import DEFAULT_NATIVE_CACHE_DIR
from paged.scheduler.planning.host_rates import measure_host

SMALL = {"large": (128, 64), "small": (64, 32)}


@pytest.fixture(scope="module")
def native() -> None:
    if (reason := load_library(DEFAULT_NATIVE_CACHE_DIR)) is not None:
        pytest.skip(f"missing tool: {reason}")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("backend", ["native", "xla"])
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_bytes_and_operations_are_those_of_the_product(backend, dtype, size):
    # Every call takes a second, but the pass over the array, which takes the whole day.
    calls = []

    def seconds_of(work) -> float:
        calls.append(work())
        return 86_400.0 if len(calls) == 1 else 1.0

    rates = measure_host(backend, dtype, **SMALL, seconds_of=seconds_of)
    assert rates.gb_per_second * 1e9 == pytest.approx(128 * 64 * size)
    assert rates.tflops * 1e12 == pytest.approx(2 * 512 * 64 * 32)
    assert rates.product == {"native": "native", "xla": "XLA"}[backend] + f" {dtype}"
    # Ones times 1 / K, summed over K.
    assert [product.shape for product in calls[1:]] == [(1, 128), (64, 64), (256, 64), (512, 64)]
    for product in calls[1:]:
        assert str(product.dtype) == dtype
        assert product.astype("float32").tolist() == [[1.0] * product.shape[1]] * len(product)


def test_a_pass_over_an_array_counts_where_it_is_faster():
    rates = measure_host("xla", "float32", **SMALL, seconds_of=lambda work: 1.0)
    assert rates.gb_per_second * 1e9 == pytest.approx(128 * 64 * 4)


def test_rates_are_measured_if_nobody_hands_in_times():
    rates = measure_host("xla", "float32", **SMALL)
    assert rates.gb_per_second > 0
    assert rates.tflops > 0
