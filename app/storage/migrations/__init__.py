"""How the database became what it is, step by step; ``database`` runs what is missing at every start."""
