"""A ``LanguageModel`` in a process of its own, for traces that vLLM cannot run; see ``process``."""
