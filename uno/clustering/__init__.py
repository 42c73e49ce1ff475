"""Clustering: k-means, neighbors, and what the known classes tell about novel ones.

:mod:`~uno.clustering.frozen` is the default method for frozen features, and
:mod:`~uno.clustering.num_classes` estimates how many novel classes they hold.
:mod:`~uno.clustering.initialization` finds the prototypes that a method starts from.
"""
