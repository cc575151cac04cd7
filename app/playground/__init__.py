"""The page at ``/playground``: its sources in ``src/``, what is built of them in ``static/``."""
