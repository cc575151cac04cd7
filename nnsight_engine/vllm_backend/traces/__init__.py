"""Blocks of Python beside requests in vLLM's worker: threads, rows, steps, and the way there and back."""
