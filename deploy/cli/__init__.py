"""The ``tandem`` command: commands, flags, chat and scale. Starts nothing itself."""
