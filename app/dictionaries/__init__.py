"""Dictionaries of features on the server: uploads, labels, and resolution of names in requests."""
