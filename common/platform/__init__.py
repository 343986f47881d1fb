"""What the machine offers: processors, threads, memory allocator, files of secrets, logging. Knows no model and no
message."""
