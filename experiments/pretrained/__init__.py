"""What the KL term does for a pretrained language model: reward, distance from the start, and what is lost."""
