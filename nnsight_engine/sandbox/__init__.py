"""Sandbox processes for untrusted code: without files, sockets or weights, and with limited resources."""
