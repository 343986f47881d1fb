"""Quality: perplexity, tokens against a reference, and what the built-in model must know. Knows no server's
internals."""
