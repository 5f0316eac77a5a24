"""Attention over a sequence that is split over ranks: decides each call, then executes its schedule."""
