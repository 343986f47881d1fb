"""Process chaos: real processes over loopback, broken on purpose while a request is provably in a given phase."""
