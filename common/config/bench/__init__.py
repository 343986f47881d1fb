"""Owns the options of the ``tandem bench`` commands, one file per command. It must not know the benchmarks."""
