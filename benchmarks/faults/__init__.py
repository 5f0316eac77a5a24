"""Fault injection: interrupts small training runs, and checks what they lose.

`kinds` lists the faults, and contains those of disks, files and nodes. `programs` starts and watches runs. `inject`
interrupts the processes of a run, resumes it and compares it with an undisturbed run. `python -m benchmarks.faults`
writes the record of the outcomes.
"""
