"""The report of a run: one HTML file that needs neither a server nor the network."""
