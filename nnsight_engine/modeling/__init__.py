"""Model classes for users, and the loading of their weights."""
