"""Stand-ins for real parts in tests: the oracle engine, workers without a model, a checkpoint without torch."""
