"""Code that travels with exported folders and runs where this project is not installed."""
