"""``tandem up --ray``: runs the processes of a system on the nodes of a Ray cluster. Owns the placement groups and the
actors; must not know what the processes do, and no object of Ray reaches them. Only this package imports Ray."""
