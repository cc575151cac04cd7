"""Compilation of a request's operations to a plan, at admission; every refusal happens here."""
