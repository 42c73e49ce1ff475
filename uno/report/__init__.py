"""The report of a run: one HTML file that opens from disk and asks the network for
nothing.
"""
