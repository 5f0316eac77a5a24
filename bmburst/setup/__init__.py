"""Checks an installation, and builds BMTrain for a machine: `bmburst doctor` and `bmburst build-bmtrain`."""
