"""Processes in which code of strangers runs: without files, sockets, weights, or more than its share."""
