"""Admission control: rate limits and quotas, checked before any work is done."""
