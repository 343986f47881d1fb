"""The built-in model: the text it learns from, and its training. Serving code never imports it."""
