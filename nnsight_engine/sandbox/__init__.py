"""Code of tenants that are not trusted: what it may say, what it may cost, and where it runs."""
