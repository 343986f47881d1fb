"""Owns the memory of KV blocks, as host memory (light) and as tensors over it (heavy). It must not know which holder
has which block."""
