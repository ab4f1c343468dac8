"""Rollouts by workers: processes of their own, outside the trainer's process group, that come and go."""
