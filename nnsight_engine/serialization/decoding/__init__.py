"""Nodes to values, code and blocks; every part of a message is checked before it is used."""
