"""Layers whose state passes from token to token, over a sequence that is split over ranks."""
