"""Owns the grammars of constrained outputs: from a client's constraint or tools to the text of an llguidance grammar
that is known to compile. Must not know HTTP, workers, or the tokens of a running request."""
