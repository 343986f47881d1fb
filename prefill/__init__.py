"""Owns the prefill worker: it builds the KV of prompts, samples the first token, ships the blocks, and decides when
blocks come back.

Must not know decode's scheduling or HTTP.
"""
