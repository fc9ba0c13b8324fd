"""The garbage collector of a server: start-up is out of its sight, and it starts rarely."""

import subprocess
import sys

from tests.server.process import ROOT

CODE = """
import gc
from paged.server.cli_serve import spare_collector
startup = [[] for _ in range(1000)]
spare_collector()
assert gc.get_freeze_count() >= 1000
assert not any(known is startup[0] for known in gc.get_objects())
assert gc.get_threshold()[0] == 10_000 and gc.isenabled()
"""


def test_what_startup_has_made_is_frozen():
    subprocess.run([sys.executable, "-c", CODE], check=True, cwd=ROOT)
