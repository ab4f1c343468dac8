"""The paper's comparisons at a scale where they can be checked."""
