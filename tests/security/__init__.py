"""Attacks from outside, one file by topic: by HTTP, raw sockets and processes, never by our own modules."""
