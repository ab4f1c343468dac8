"""JetStream around our engine: Engine interface, Driver and orchestrator. Only this package imports JetStream."""

INSTALL = "pip install --no-deps google-jetstream==0.2.2"
"""How to install JetStream. Its own requirements name TensorFlow, for a tokenizer that is never called here."""
