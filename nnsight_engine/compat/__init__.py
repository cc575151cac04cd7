"""Running code that was written for nnsight, unchanged: ``import nnsight`` gives this library.

``python -m nnsight_engine.compat script.py`` runs a script so; ``install()`` does it within a program.
"""

from nnsight_engine.compat.finder import OriginalInstalledError, install, uninstall

__all__ = ["OriginalInstalledError", "install", "uninstall"]
