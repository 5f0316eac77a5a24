"""Evaluation of long context: passkey retrieval, and loss by position."""
