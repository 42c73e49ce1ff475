"""Discovery methods of the literature, one module a method, and what they share.

A method is a module with a subclass of :class:`uno.method.Method`, an instance of it as
``METHOD``, and its line in :data:`uno.method.METHODS`. Your own method, in a package of
your own, is named by ``--method package.module:METHOD``. A pretext task is a module
with a ``PRETEXT`` and its line in :data:`uno.method.PRETEXTS`; ``--pretext.task`` names
one in the same way.

All methods share the encoder, pretraining, batches, views, SGD, schedule and
evaluation. Baselines use two large views. Unless its module says otherwise, the novel
head of a baseline is one layer of cosines on the feature, divided by tau, where the
papers have a linear layer with a bias. So known and novel outputs are comparable, and
predict, report and export serve every method.
"""
