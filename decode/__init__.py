"""The bandwidth-optimised pool: takes reservations, admits verified KV, batches continuously, streams token spans.

Also serves colocated and local prefill, which are the same worker given whole requests. Must not know: HTTP, text.
"""
