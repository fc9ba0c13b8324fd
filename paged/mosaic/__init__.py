"""Attention kernels in Pallas' Mosaic GPU dialect, for NVIDIA Hopper."""
