"""What the server asks of an engine, and the engines that answer."""
