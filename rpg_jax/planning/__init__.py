"""Plans programs for TPUs that are not there: compiles them, and compares their costs with a chip's limits."""
