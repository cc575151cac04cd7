"""What runs a compiled block."""

from nnsight_engine.intervention.backends import base, execution, remote

__all__ = ["base", "execution", "remote"]
