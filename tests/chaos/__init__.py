"""Process chaos: real processes over loopback, into which faults are injected while a request is in a known phase."""
