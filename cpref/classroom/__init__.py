"""What makes a notebook a classroom: cells on real ranks, and a check of the machine."""
