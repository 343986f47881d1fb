"""All tests. They may enter every room of the house; nothing outside imports them."""
