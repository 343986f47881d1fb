"""Names that all share: ids, errors, requests, sequences, timeouts. Pure, and at the bottom: imports nothing of ours
but itself."""
