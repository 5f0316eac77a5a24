"""Long-context evaluation: passkey retrieval, and loss by position."""
