"""Presets: named lists of operations that the server keeps, and requests that name them."""
