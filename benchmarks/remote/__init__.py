"""What it costs to run a trace on a server: see ``__main__``."""
