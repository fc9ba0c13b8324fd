"""Freed memory stays with the process, or goes back, where the C library allows it."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import numpy as np
from paged.backends import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(50_000_000, np.int8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

without = faults()
print(int(keep_freed_memory()), without, faults())
"""


def test_large_temporaries_are_faulted_in_once_not_every_time():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    is_kept, without, kept = map(int, done.stdout.split())
    if not is_kept:
        pytest.skip("the C library is not glibc")
    # The first of twenty still is; huge pages make the counts differ between machines.
    assert kept < without / 2


FREEING_SCRIPT = """
import numpy as np
from paged.backends import release_freed_memory

def used():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) // 1024

np.ones(30_000_000, np.int8)  # once such a one is freed, the next ones are on the heap
before = used()
arrays = [np.ones(5_000_000, np.int8) for _ in range(40)]
del arrays[:-1]  # the last keeps the heap's end where it is
freed = used() - before
print(int(release_freed_memory()), freed, used() - before)
"""


def test_freed_arrays_below_others_go_back_to_the_system():
    done = subprocess.run(
        [sys.executable, "-c", FREEING_SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    is_done, kept, left = map(int, done.stdout.split())
    if not is_done:
        pytest.skip("the C library is not glibc")
    assert kept > 150  # MB of the 200
    assert left < 30
