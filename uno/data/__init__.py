"""Read data sets, decode their images, and make batches for training and evaluation."""
