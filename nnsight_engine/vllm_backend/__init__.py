"""Interventions in vLLM's engine: taps, hooks, model runner, scheduler and engine client."""
