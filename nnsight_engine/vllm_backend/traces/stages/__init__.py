"""Traces over the stages of a pipeline: blocks run on the last one, and the others offer it their values."""
