"""`bmburst bench attention`: attention over ranks measured against one GPU's kernel and against every peer.

`cells` is what can be measured, as plain data; `masks` and `work` its arithmetic; `methods` what is measured; `measure`
what a rank does, with `block` around a method; `report` the tables and pictures; `kind` tells the engine.
"""
