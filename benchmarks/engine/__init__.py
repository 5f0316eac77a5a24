"""The engine of the benchmarks: cells, jobs on ranks, files of results, tables and pictures, for any kind of benchmark.

A kind (`kind`) says what a cell is, how a rank measures it, and what its tables and pictures show. The engine does the
rest: `command` reads the options of `bmburst bench`, `job` starts the ranks and starts them again after a loss, `rank`
runs the cells on a rank, `results` is the file, `table` and `figure` show it, `timing`, `timeline` and `machine`
measure. `bmburst bench` recognises a clone of the repository by the next line.
"""

PROJECT = "bmburst"
