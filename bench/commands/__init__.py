"""One module per ``tandem bench`` command, whose ``run`` takes the configuration, prints a table, saves the figures and
returns the exit code. The experiments on one mechanism are in :mod:`bench.micro`."""
