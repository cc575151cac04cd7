"""Blocks of strangers, in processes of their own: ``cells`` is the worker's side, ``inside`` the other."""
