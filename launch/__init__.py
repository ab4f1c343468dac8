"""Programs that start rpg_jax on other machines, or prepare this one."""
