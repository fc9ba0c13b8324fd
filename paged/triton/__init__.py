"""Attention and cache kernels in Triton, for NVIDIA GPUs."""
