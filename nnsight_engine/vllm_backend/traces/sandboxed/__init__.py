"""Untrusted blocks in processes of their own: ``sandbox_pool`` is the worker's side, ``sandbox_main`` the
process's."""
