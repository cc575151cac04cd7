"""Blocks of strangers, in processes of their own: see ``cells`` for the worker's side, ``inside`` for the other."""
