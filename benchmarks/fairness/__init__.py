"""How long one tenant waits while another floods the server: see ``__main__``."""
