"""What stands on an ``eproperty``'s stub."""

from nnsight_engine.envoys.hooks import (
    requires_input,
    requires_operation_input,
    requires_operation_output,
    requires_output,
)

__all__ = ["requires_input", "requires_operation_input", "requires_operation_output", "requires_output"]
