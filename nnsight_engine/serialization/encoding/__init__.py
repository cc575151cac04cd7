"""Values, code and blocks to nodes."""
