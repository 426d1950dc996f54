"""May a run go to production on this machine, what is broken if not, and how much memory it will need."""
