"""One module per ``tandem bench`` command. Each reads its configuration, runs, prints a table and saves a result."""
