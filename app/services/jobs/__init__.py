"""Jobs: traces that run without a connection to their client, from acceptance to the result."""
