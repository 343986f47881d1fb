"""``tandem up``: the supervisor, its child processes, their IPC, and the terminal output. Must not know requests: the
launcher starts, places and replaces processes only."""
