"""Attacks from outside through HTTP, raw sockets and processes, one file per topic; the product's modules are not
used."""
