"""The steps of vLLM's engine, and the names of vLLM on which the engine's code depends."""
