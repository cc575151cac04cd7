from __future__ import annotations

from collections.abc import Sequence

from nnsight_engine.families.registry import ENGINE_FAMILIES


class UnsupportedModelError(Exception):
    """The loaded model's architecture is in no table, or its modules do not match its table."""

    @classmethod
    def unknown(cls, class_name: str, architectures: Sequence[str]) -> UnsupportedModelError:
        supported = [
            name for family in ENGINE_FAMILIES for name in family.architectures or family.model_classes
        ]
        return cls(
            f"the architecture must be one of {', '.join(supported)}, "
            f"got {', '.join(architectures) or 'none'} (vLLM class {class_name}); serve another model, "
            "drop --model-impl transformers if it was given, or drop --points strict"
        )
