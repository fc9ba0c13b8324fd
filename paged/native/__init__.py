"""CPU kernels in C++, called by XLA: built on first use, and optional."""
