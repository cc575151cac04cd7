"""Tiny checkpoints of every supported model family, and what transformers computes on them."""
