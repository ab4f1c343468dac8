"""Research programmes: each folder has a README with what was found, a program and its data. The package needs none."""
