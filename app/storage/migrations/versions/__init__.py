"""The order is that of their ``down_revision``."""
