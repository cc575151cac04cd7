"""Who may do what: each rule is one function that routes and services call before anything is run."""
