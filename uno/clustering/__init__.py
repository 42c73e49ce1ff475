"""Cluster features: k-means, nearest neighbors, and estimates from known classes.

:mod:`~uno.clustering.frozen` is the default method for frozen features, and
:mod:`~uno.clustering.num_classes` estimates how many novel classes they hold.
:mod:`~uno.clustering.initialization` finds the prototypes that a method starts from.
"""
