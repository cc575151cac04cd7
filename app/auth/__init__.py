"""Authentication and authorization: each rule is one function, called before anything runs."""
