"""Flax models, checkpoints and sampling: knows arrays and parameters, never requests."""
