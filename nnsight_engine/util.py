"""The documented import path ``nnsight.util``; nothing is defined here."""

from nnsight_engine.modeling.wrapper import WrapperModule

__all__ = ["WrapperModule"]
