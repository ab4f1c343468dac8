"""Cloud TPU from the command line. Standard library only: it runs before anything is installed."""
