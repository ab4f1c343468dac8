"""What a run shows: live progress, curves, summary. Reads run folders and plain numbers, never a model."""
