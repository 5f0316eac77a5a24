"""The engine of `bmburst bench`: runs cells on ranks, and writes results, tables and pictures.

A kind of benchmark (`Kind`) defines its cells, how a rank measures one, and its tables and pictures. `kinds` defines
kinds, cells and the file of results. `rows` contains the benchmarks whose rows are not cells, and their records.
`command` reads the options, `job` starts the ranks and runs the cells on each, `report` contains shared code for tables
and pictures, `timing` times and traces calls, and `machine` contains the ranks, their memory and the header of a run.
"""

PROJECT = "bmburst"
"""By this line `bmburst bench` recognizes a clone of the repository."""
