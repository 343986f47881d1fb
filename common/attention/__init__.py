"""Attention over paged KV: what a backend promises, the oracle, and the backends.

Must not know: requests, models, schedulers.
"""
