"""Fault injection: interrupts training runs, resumes them, and compares them with undisturbed runs."""
