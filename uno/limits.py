"""The largest inputs that are accepted. What is beyond is refused in one line before memory is spent on it;
docs/reference/limits.md has the same numbers, and a test compares them.
"""

MAX_IMAGE_BYTES = 128 * 2**20  # of an encoded image
MAX_IMAGE_PIXELS = 100_000_000  # that its header announces
MAX_PIXELS_PER_BYTE = 10_000  # of an image above a megapixel; one color as a 1-bit PNG has 8,256
MAX_BMP_PIXELS_PER_BYTE = 256  # of any BMP; runs of one color have 128, and Pillow reads runs in Python
MAX_TABLE_BYTES = 2**30  # of a CSV or JSONL file
MAX_MEMBER_BYTES = 2**20  # of a .cls or .json in a tar file, and of a header's own text
MAX_CIFAR_BYTES = 512 * 2**20  # of one batch file
MAX_ROWS = 20_000_000  # of a source; ImageNet-21k has 14 million
MAX_LABEL_LENGTH = 300  # characters of a class's name
MAX_CLASSES = 10_000  # known and novel: the matrix of one head's confusion then takes 800 MB
MAX_CONFIG_BYTES = 1_000_000  # of a YAML file
MAX_CONFIG_DEPTH = 20  # of what is nested in it
MAX_CONFIG_VALUES = 100_000  # keys, values and brackets
MAX_STATE_BYTES = 64 * 2**20  # of a JSON file that a run or a model consists of
MAX_THREADS = 1024  # of a process, and no more than four for each core or 64
MAX_QUEUE_ROWS = 1_000_000  # of objective.queue_size
