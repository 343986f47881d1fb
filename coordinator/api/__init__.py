"""The OpenAI API: validates request bodies and encodes responses. Must not know connections, or how a request is placed
on workers."""
