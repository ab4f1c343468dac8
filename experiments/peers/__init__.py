"""Other libraries on the same work as ours, in one run on one machine."""
