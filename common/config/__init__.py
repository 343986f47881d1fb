"""Configuration of every command: options, files, environment, and how they are shown. Knows no process."""
