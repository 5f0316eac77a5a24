"""Measurements of a clone of the repository, not installed with the library, and their recorded results."""
