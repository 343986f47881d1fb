"""Owns the other processes of a tensor-parallel worker: their start, what rank 0 sends them, and their watch. Must not
know what a step computes."""
