"""Measurements, each with the command, the machine and the date beside its committed result."""
