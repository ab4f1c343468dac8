"""What `python -m rpg_jax.bench` measures, one command a module."""
