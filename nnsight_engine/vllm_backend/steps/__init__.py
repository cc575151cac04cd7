"""A step of the engine as interventions see it, whichever of vLLM's runners runs it."""
