"""Sequence parallelism for models of other projects: `transformers` and `cpm_live`, each imported by name."""
