"""Requests, blocks and the step loop: knows token ids and block ids, never layers."""
