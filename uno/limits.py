"""Limits on the size of inputs: files, images, tables and configurations.

A larger input is refused in one line, before memory is spent on it. The page
docs/reference/limits.md is the table of these limits.
"""

# bytes of an encoded image
MAX_IMAGE_BYTES = 128 * 2**20
# pixels that its header announces
MAX_IMAGE_PIXELS = 100_000_000
# pixels per byte above a megapixel; one color as a 1-bit PNG has 8,256
MAX_PIXELS_PER_BYTE = 10_000
# pixels per byte of a BMP: runs of one color have 128 and are slow to read
MAX_BMP_PIXELS_PER_BYTE = 256
# bytes of a CSV or JSONL file
MAX_TABLE_BYTES = 2**30
# bytes of a .cls or .json in a tar file, and of a header's own text
MAX_MEMBER_BYTES = 2**20
# bytes of the arrays in a .npz or .pt file, which are read into memory
MAX_NPZ_BYTES = 8 * 2**30
# bytes of a CIFAR batch
MAX_CIFAR_BYTES = 512 * 2**20
# rows of a source to train on, pack or check: 5 GB of metadata
MAX_ROWS = 100_000_000
# characters of a class's name
MAX_LABEL_LENGTH = 300
# known and novel classes: the confusion matrix of one head then takes 800 MB
MAX_CLASSES = 10_000
# bytes of a YAML file
MAX_CONFIG_BYTES = 1_000_000
# levels in it
MAX_CONFIG_DEPTH = 20
# keys, values and brackets in it
MAX_CONFIG_VALUES = 100_000
# bytes of a JSON file of a run or a model
MAX_STATE_BYTES = 64 * 2**20
# threads of a process, and at most 64 or four per core
MAX_THREADS = 1024
# rows of objective.queue_size
MAX_QUEUE_ROWS = 1_000_000
