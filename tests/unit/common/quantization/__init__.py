"""Tests of common.quantization."""
