"""The scheduler and the block pool driven by traces, without a model."""
