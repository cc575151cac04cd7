"""Commands for a person at a terminal, against a server that runs: ``chat``, ``lens``, ``steer``.

Nothing here may import torch, vLLM or the server's own parts: a command starts at once.
"""
