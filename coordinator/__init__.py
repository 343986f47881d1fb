"""The coordinator: HTTP API, text processing, routing, and the state of every request.

Owns the tokenizer, the client streams, the registry of workers and the accepted output tokens. Must not know torch or
KV bytes.
"""
