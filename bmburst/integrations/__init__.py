"""Sequence parallelism for models of other projects: `transformers` and `cpm_live`. Import each explicitly."""
