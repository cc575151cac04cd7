"""The versions of vLLM that this project works with; imports neither vLLM nor torch."""
