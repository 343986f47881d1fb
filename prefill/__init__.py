"""The compute-optimised pool: builds the KV of prompts, samples the first token, ships the blocks.

Owns the prefill worker's policy (order of prompts, when blocks come back). Must not know: decode's scheduling, HTTP.
"""
