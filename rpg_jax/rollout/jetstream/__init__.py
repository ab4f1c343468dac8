"""JetStream around our engine: its Engine interface, its Driver and its orchestrator. Only this package imports it."""

INSTALL = "pip install --no-deps google-jetstream==0.2.2"
"""How JetStream is installed. Its own requirements hold TensorFlow, for a tokenizer that is never called."""
