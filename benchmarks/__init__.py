"""Benchmarks of a clone of the repository, which is not installed with the library, and their recorded results."""
