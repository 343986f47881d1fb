"""One file per ``tandem bench`` command: its options."""
