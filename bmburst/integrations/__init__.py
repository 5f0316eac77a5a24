"""bmburst inside other projects' models: one module a project, imported only by its name."""
