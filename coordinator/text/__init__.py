"""Text to tokens and back: tokenizer, chat template, control tokens, and the lanes in which that work runs. Knows no
worker."""
