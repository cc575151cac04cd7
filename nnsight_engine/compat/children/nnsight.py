"""``import nnsight`` in a process that such a script has started: installs the hooks, and is replaced.

A process that ``multiprocessing`` spawns, as vLLM's engine is, has the parent's ``sys.path`` but no import
hooks.
"""

from __future__ import annotations

import sys

import nnsight_engine
from nnsight_engine.compat.finder import OLD, install

sys.modules.pop(OLD, None)  # this module
install(force=True)
sys.modules[OLD] = nnsight_engine
