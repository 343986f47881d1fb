"""Owns the paged KV cache: layout, block pool, block tables and prefix index (all pure), and the memory of the blocks
(``storage``). It must not know requests, sockets or schedulers."""
