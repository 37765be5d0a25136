"""`zoo bench` and `zoo report`.

models.py      a model's workloads in turns with its peers      trace.py     its kernels by the GPU's clock
kernels.py     single kernels, of the table in cases.py         timing.py    how they are timed; copy bandwidth
encoder.py     a transformer encoder on seeded weights          machine.py   what a report says of where it was made
show.py        a report on the terminal
report.py      reports of one or several machines as a page     plot.py      its pictures

The other engines are in `zoo.peers`.
"""
