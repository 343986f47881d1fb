"""Parts that stand in for real ones in tests: the oracle engine, workers without a model."""
