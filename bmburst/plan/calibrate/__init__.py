"""Measuring this machine, for `bmburst plan --calibrate`: one device here, links between devices by ranks of their own.

What cannot be measured here is taken from a machine that is known, and says so.
"""
