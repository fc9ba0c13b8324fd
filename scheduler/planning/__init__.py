"""What a model needs of a GPU, and what a GPU can do with it, before either is there."""
