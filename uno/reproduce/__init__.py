"""The paper's tables and figures: ``experiments`` (what is trained, how it is counted,
what the paper says), ``effects`` (what finished runs say of it), ``documents`` and
``figures`` (how it is shown).

``pipelines.tables`` runs what is missing and calls these. A *cell* is one run: a row, a
data set, a seed.
"""
