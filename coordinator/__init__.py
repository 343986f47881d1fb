"""The door: HTTP, text, routing and the life of every request.

Owns the tokenizer, the client stream, the registry of workers and the accepted tokens. Must not know: torch, KV bytes.
"""
