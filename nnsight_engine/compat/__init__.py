"""Compatibility with code written for nnsight: ``import nnsight`` returns this library.

``python -m nnsight_engine.compat script.py`` runs a script in this way; ``install()`` enables it within a
program.
"""

from nnsight_engine.compat.finder import OriginalInstalledError, install, uninstall

__all__ = ["OriginalInstalledError", "install", "uninstall"]
