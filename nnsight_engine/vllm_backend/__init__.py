"""Interventions inside vLLM's worker: taps, hooks, the runner, the scheduler, the engine client."""
