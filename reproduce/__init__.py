"""Reproduce the tables of results of the paper and of this project.

``experiments`` reads the tables (``experiments.yaml``) and the paper's numbers
(``published.yaml``). ``summary`` computes means over seeds from finished runs.
``documents`` writes them. ``tables`` trains the missing runs as processes (``cells``).
``command`` declares ``uno reproduce``. A *cell* is one run: a row of a table, a data
set, and a seed.
"""
