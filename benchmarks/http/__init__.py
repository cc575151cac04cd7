"""What our server costs beside vLLM's own, over HTTP: see ``__main__``."""
