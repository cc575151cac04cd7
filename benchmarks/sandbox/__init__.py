"""What the sandbox costs."""
