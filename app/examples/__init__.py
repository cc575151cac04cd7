"""Examples that come with the bundled model: stored at the start of a server, and shared."""
