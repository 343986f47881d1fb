"""All tests. They may import every package of the product; nothing outside ``tests`` imports them."""
