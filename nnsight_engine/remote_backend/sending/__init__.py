"""A trace on its way to a server: its blocks, its inputs, and the parts of it that run at the client."""
