"""NVIDIA GPUs, present or not: what a target is, and programs compiled for one that is absent."""
