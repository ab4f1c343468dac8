"""Which objective each loss reaches, on a small Qwen whose completions can be enumerated."""
