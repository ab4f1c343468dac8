"""RPG: regularized policy gradients (arXiv:2505.17508) for Qwen models on TPU, in JAX."""

__version__ = "0.1.0"
