"""Owns ``tandem top``, the live view of a running system in a terminal: its feed, its state, its lines and its screen.
It must not know more of the server than its HTTP API."""
