"""Encoders: how they are built, their weights, and runtimes of frozen ones."""
