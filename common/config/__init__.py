"""Owns the configuration of every command: its options, where their values come from, and how they are shown. It must
not know the processes that use them."""
