"""Rewards of completions. This package never imports JAX. A verifier's process imports little, so it starts fast."""
