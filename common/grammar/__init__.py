"""Token masks of grammars: owns the matchers of sequences, the compiled grammars and the threads that compute masks.
Must not know HTTP, schemas, or the text of requests."""
