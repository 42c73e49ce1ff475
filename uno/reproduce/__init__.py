"""The paper's tables: what is trained and counted, and what finished runs say.

``experiments`` reads the tables (``experiments.yaml``) and the paper's numbers
(``published.yaml``), ``summary`` computes means over seeds from finished runs, and
``documents`` writes them. ``pipelines.tables`` runs what is missing and calls these. A
*cell* is one run: a row of a table, a data set, and a seed.
"""
