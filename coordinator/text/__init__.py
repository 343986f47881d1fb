"""Conversion of text to tokens and back: tokenizer, chat templates, control tokens, and the threads in which that work
runs. Must not know workers or connections."""
