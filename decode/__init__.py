"""Owns the decode worker: it takes reservations, admits verified KV, batches continuously and streams token spans, and
serves whole requests where prefill is colocated or local.

Must not know HTTP or text.
"""
