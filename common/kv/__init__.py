"""Paged KV: layout, block pool, block tables, prefix index (all pure), and the store that holds the tensors.

Must not know: requests, sockets, schedulers.
"""
