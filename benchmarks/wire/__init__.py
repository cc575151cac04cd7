"""How long it takes to make bytes of traces and of what they saved, and to read them again."""
