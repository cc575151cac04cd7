"""Who ran what, and who changed what: written down beside the requests, and told to administrators."""
