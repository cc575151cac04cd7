"""The steps of the database's schema; ``database`` runs those that are missing at every start."""
