"""Owns the training of the built-in model, reproducible from its seed: tokenizer, model, draft model, evaluation.

``python -m bench.builtin_model.training all`` runs all steps; each can be run alone and resumes where it stopped. The
corpus, in contrast, must not know torch.
"""
