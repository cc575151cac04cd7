"""Terminal commands that talk to a running server: ``chat``, ``lens``, ``steer``, ``vectors`` and so on.

Nothing here may import torch, vLLM or the server's own modules, so that a command starts at once.
"""
