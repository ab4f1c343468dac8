"""Which gradient each loss has on completions of several tokens, and where it ends."""
