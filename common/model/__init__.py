"""Owns the preparation of a transformers model for serving: loading, checks, and replacement of its modules.

Must not know requests, batches or schedulers.
"""
