"""What model classes are put together from: loading, loading late, running elsewhere."""
