"""Starts ranks and watches them: by the launcher of one machine, or under torchrun; hands them a request."""
