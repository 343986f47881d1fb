"""Owns the reading of what a model writes: reasoning, tool calls, content. Must not know HTTP or tokens' ids."""
