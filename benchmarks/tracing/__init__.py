"""What tracing costs beside hooks written by hand, and beside a model that nobody looks into."""
