"""The HTTP server: OpenAI's API with interventions, in front of an engine client."""
