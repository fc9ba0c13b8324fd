"""Names of what `paged bench` measures and does; the command line needs them, and no NumPy."""

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 95, 99)
RAMP_UP_STRATEGIES = ("linear", "exponential")
