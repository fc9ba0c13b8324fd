"""The kernels: Triton's dialect of Python, which no type checker understands."""
