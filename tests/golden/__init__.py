"""What the system did when it was last frozen. Owns the frozen files and the commands that make and compare them; only
``adapter`` knows modules of ours."""
