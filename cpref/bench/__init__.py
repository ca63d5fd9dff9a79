"""`cpref bench`: sharded attention beside the alternatives, timed in one run."""
