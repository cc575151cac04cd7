"""The bytes of a message: nodes, their scalars and tensors."""
