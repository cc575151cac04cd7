"""The tree of envoys that mirrors a model's modules; traced blocks read and write values through it."""
