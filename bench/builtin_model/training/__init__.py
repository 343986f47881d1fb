"""How the built-in model is made again from its seed: tokenizer, model, draft, figures. The only part that needs torch.

``python -m bench.builtin_model.training all`` does everything; each step can be run alone and goes on where it was
stopped.
"""
