"""Files of a checkpoint: what there is, and what they say. Light, since the coordinator reads them, too."""
