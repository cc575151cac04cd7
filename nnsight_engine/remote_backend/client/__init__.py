"""The client: backends, connections, jobs and their display."""
