"""Rewards of completions. This package never imports JAX, and a worker of verifiers only what the worker needs."""
