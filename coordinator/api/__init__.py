"""The OpenAI interface: what a body means, and what an answer looks like. Knows no connection and no worker."""
