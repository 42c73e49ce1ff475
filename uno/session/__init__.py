"""A run from what was asked for to its finished directory, in this process.

``settings`` and ``resolve`` make the configuration, ``data`` opens what it names,
``job`` trains, measures and finishes, ``predict`` and ``estimation`` do what their
commands do, ``resources`` says what fits into memory, ``summary`` what a run will do,
``console`` shows it, ``api`` is the Python interface. Whoever has other machines passes
a :class:`~uno.session.place.Place`.
"""
