"""Memory of KV blocks: on the host (light) and as tensors (heavy). Knows blocks, not who holds them."""
