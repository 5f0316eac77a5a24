"""Benchmarks and their recorded results. They run from a clone and are not installed with the library."""
