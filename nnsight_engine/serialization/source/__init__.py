"""The source of loaded and of received code."""
