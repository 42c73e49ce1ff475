"""From what is on disk to batches, in the order of ARCHITECTURE.md."""
