"""Owns attention over paged KV: the backend interface, the reference implementation, and the backends.

Must not know requests, models or schedulers.
"""
