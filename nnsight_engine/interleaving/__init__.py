"""Interleaved execution of a model and traced blocks: mediators, the interleaver, batching, barriers."""
