"""Do the work of each command, from the user's settings to the finished run directory.

``configure`` and ``derive`` make the configuration. ``data`` opens the rows that it
names, ``prepare`` checks both and opens a ``run``, and ``pipeline`` holds the steps of
the commands. ``backend`` does the work of a run in this process, and ``ranks`` in the
processes that torchrun started. ``predict``, ``estimation`` and ``embed`` implement the
commands ``uno predict``, ``uno estimate-classes`` and ``uno embed``. ``resources``
estimates memory, ``console`` prints, ``loggers`` sends metrics to other programs, and
``api`` is the Python interface.
"""
