"""Traces over pipeline stages: blocks run on the last stage, and the others offer it their values."""
