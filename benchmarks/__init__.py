"""What we claim about speed and memory, measured against plain vLLM on the same machine, as ratios."""
