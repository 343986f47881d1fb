"""One room at a time: parts of the system without the others, mostly without processes and without a model."""
