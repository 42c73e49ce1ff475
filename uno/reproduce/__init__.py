"""The paper's tables and figures: what each is made of, and what finished runs say about it.

Modules in the order of a table's making::

    experiments   every table: rows, data sets, ways of counting, the paper's numbers -> cells to run
    effects       metrics of finished cells -> means, spreads, effects, verdicts
    documents     these -> Markdown, Parquet, HTML, a record
    figures       t-SNE maps of checkpoints (Fig. 4 and the appendix's)

``pipelines.reproduce`` runs what is missing and calls these. A *cell* is one run: a row, a data set, a seed.
"""
