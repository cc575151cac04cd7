"""Untrusted blocks in sandbox processes: ``sandbox_pool`` is the worker's side, ``sandbox_main`` theirs."""
