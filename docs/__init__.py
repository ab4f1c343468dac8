"""The pages, and the program that writes some of them from the code."""
