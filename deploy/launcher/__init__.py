"""``tandem up``: the supervisor, its child processes, what they say to each other, and the screen. Knows no request."""
