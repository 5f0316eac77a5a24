"""`bmburst bench attention`: attention over ranks measured against one GPU's kernel and against every peer.

`cells` is what can be measured, as plain data; `work` its arithmetic; `job` what the ranks are told; `start` starts
them and survives their loss; `rank` is what a rank runs: `speed`, `block` and `accuracy` measure a cell each by the
methods of `methods`; `results` is the file; `table` and `figure` show it. Nothing else imports this package.
"""
