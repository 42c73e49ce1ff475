"""A run from what was asked for to its finished directory.

``settings`` and ``resolve`` make the configuration, ``data`` opens what it names,
``prepare`` checks both and opens a ``run``, and ``pipeline`` holds the steps of the
commands. ``backend`` and ``ranks`` do the work of a run in this process or in ranks of
torchrun. ``predict``, ``estimation`` and ``embed`` do what their commands do,
``resources`` says what fits into memory, ``summary`` what a run will do, ``console``
shows it, ``api`` is the Python interface.
"""
