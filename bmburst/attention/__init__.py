"""Attention over a split sequence: decide, then obey the schedule."""
