"""Jobs on disk: rows and leases in the database, requests and results in files, and their quota."""
