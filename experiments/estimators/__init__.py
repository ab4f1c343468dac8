"""Which gradient each loss has on completions of one token, by exact sums."""
