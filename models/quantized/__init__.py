"""Weights in fewer bits: how they are kept, and the checkpoint formats that they come in."""
