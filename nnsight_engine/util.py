"""The documented import path ``nnsight.util``; nothing is defined here."""

from nnsight_engine.modeling.generator import WrapperModule

__all__ = ["WrapperModule"]
