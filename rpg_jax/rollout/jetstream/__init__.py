"""JetStream around our engine: its Engine interface, its Driver and its orchestrator. Only this package imports it."""

INSTALL = "pip install --no-deps google-jetstream==0.2.2"
"""The command that installs JetStream. JetStream's own requirements name TensorFlow, for a tokenizer never called
here."""
