"""What is traced, on both sides."""

from __future__ import annotations

from typing import Final

PROMPT: Final = "The Eiffel Tower is in the city of"
LAYER: Final = 15
SAVED_BYTES: Final = 50_000_000
