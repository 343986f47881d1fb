"""Weights that stay as small in memory as on disk: one layout of groups, and readers that produce it from each format
of quantized checkpoints. It knows nothing of models, layers or kernels."""
