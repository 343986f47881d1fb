"""A transformers model made ready to serve: loading, checks, and surgery on its modules.

Must not know: requests, batches, schedulers.
"""
