"""The engine of `bmburst bench`: runs cells on ranks, and writes results, tables and pictures.

A kind of benchmark (`kind.Kind`) defines its cells, how a rank measures one, and its tables and pictures. The engine
does the rest: `command` reads the options, `job` starts the ranks and runs the cells on each, `kind` reads and writes
the file of results, `report` contains shared code of tables and pictures, `timing` times and traces calls, and
`machine` contains the ranks, their memory and the header of a run.
`bmburst bench` recognizes a clone of the repository by the next line.
"""

PROJECT = "bmburst"
