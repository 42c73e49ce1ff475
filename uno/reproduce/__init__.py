"""The paper's tables and figures: what each is made of, and what finished runs say about it.

Modules in the order of a table's making::

    published     the paper's numbers, as they stand there
    definitions   what tables are made of: data sets, rows, ways of counting
    tables        every table as data
    results       metrics of finished runs -> means, spreads, effects, verdicts
    page          results -> Markdown, Parquet, HTML
    figures       t-SNE maps of checkpoints (Fig. 4 and the appendix's)

``pipelines.reproduce`` runs what is missing and calls these. A *cell* is one run: a row, a data set, a seed.
"""
