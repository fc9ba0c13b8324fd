"""Which cached block goes when room is needed: one policy family per file."""
