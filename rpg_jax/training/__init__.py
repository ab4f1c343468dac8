"""The step, the loop around it, and what survives a kill."""
