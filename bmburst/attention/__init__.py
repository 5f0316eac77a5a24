"""Attention over a sequence that is split over ranks: plans each call, then executes its schedule."""
