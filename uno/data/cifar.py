"""CIFAR10 and CIFAR100 in torchvision's directory layout, unpickling nothing but
lists and bytes.
"""

import os
import pickle
import pickletools
from collections.abc import Callable
from io import BytesIO
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from uno.data import files as filesystem
from uno.data.columns import Labels, Numbered
from uno.data.images import InMemory
from uno.data.rows import Rows
from uno.errors import ConfigError, one_line
from uno.limits import MAX_CIFAR_BYTES

PIXELS = 3 * 32 * 32
MAX_MEMO = 10**6  # of a pickle; a batch of CIFAR uses 10


class Layout(NamedTuple):
    """Where one of the two data sets keeps what."""

    prefix: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    label_key: str
    names_key: str
    num_classes: int


CIFAR10 = Layout(
    "cifar10",
    "cifar-10-batches-py",
    tuple(f"data_batch_{i}" for i in range(1, 6)),
    ("test_batch",),
    "batches.meta",
    "labels",
    "label_names",
    10,
)
CIFAR100 = Layout(
    "cifar100",
    "cifar-100-python",
    ("train",),
    ("test",),
    "meta",
    "fine_labels",
    "fine_label_names",
    100,
)


def read_cifar(layout: Layout, path: str, download: bool) -> Rows:
    """Rows of CIFAR10 or CIFAR100 below ``path`` (or in it): uint8 (N,32,32,3),
    classes in order of id.
    """
    root = _find(layout, path, download)
    meta = filesystem.join(root, layout.meta)
    names = [_text(name) for name in _field(_load(meta), layout.names_key, list, meta)]
    if len(names) != layout.num_classes or len(set(names)) != len(names):
        raise ConfigError(
            f"{meta}: expected {layout.num_classes} different class names"
        )
    batches = {
        file: _batch(layout, filesystem.join(root, file))
        for file in (*layout.train, *layout.test)
    }
    ids = Numbered(
        [*batches], np.cumsum([0, *(len(labels) for _, labels in batches.values())])
    )
    images = InMemory(np.concatenate([pixels for pixels, _ in batches.values()]))
    codes = np.concatenate([labels for _, labels in batches.values()]).astype(np.int32)
    is_train = np.repeat(
        [file in layout.train for file in batches], np.diff(ids.starts)
    )
    return Rows(
        ids,
        images,
        Labels(names, codes),
        is_train,
        f"{layout.prefix}:{path}",
        tuple(names),
    )


def _find(layout: Layout, path: str, download: bool) -> str:
    if filesystem.kind(filesystem.join(path, layout.meta)) == "file":
        return path
    root = filesystem.join(path, layout.folder)
    if filesystem.kind(root) == "missing" and download:
        _download(layout, path)
    if filesystem.kind(root) == "missing":
        fix = "unpack the archive, or allow the download with --data.download"
        raise ConfigError(
            f"{layout.prefix}:{path}: no folder {layout.folder} there; {fix}"
        )
    return root


def _download(layout: Layout, path: str) -> None:
    """Unpacked beside its place, which it takes when it is whole; another process
    may be there first.
    """
    from torchvision import datasets  # imported here: the only use, and slow
    from torchvision.datasets.utils import check_integrity, download_and_extract_archive

    if filesystem.is_uri(path):
        raise ConfigError(f"{layout.prefix}:{path}: the download needs a local folder")
    source = datasets.CIFAR10 if layout is CIFAR10 else datasets.CIFAR100
    name, md5, root = source.filename, source.tgz_md5, os.path.join(path, layout.folder)
    # verifies the archive's checksum; torchvision's own class would also unpickle it
    try:
        os.makedirs(path, exist_ok=True)
        with TemporaryDirectory(prefix=".uno-", dir=path) as own:
            archive = path if check_integrity(os.path.join(path, name), md5) else own
            download_and_extract_archive(source.url, archive, own, name, md5)
            try:
                os.rename(os.path.join(own, layout.folder), root)
            except OSError:
                if filesystem.kind(root) == "missing":
                    raise
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"cannot download {source.url} to {path}: {one_line(error)}"
        ) from None


def _batch(layout: Layout, path: str) -> tuple[np.ndarray, list[int]]:
    """Pixels uint8 (N,32,32,3) and class ids of one file."""
    content = _load(path)
    pixels = _field(content, "data", _Array, path).pixels
    labels = _field(content, layout.label_key, list, path)
    if any(type(n) is not int or not 0 <= n < layout.num_classes for n in labels):
        raise ConfigError(
            f"{path}: {layout.label_key} must be numbers from 0 to"
            f" {layout.num_classes - 1}"
        )
    if pixels.shape != (len(labels), PIXELS):
        raise ConfigError(
            f"{path}: data must be uint8 ({len(labels)}, {PIXELS}), not {pixels.shape}"
        )
    return (
        np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)),
        labels,
    )


def _field(content: Any, key: str, kind: type, path: str) -> Any:
    value = (
        content.get(key, content.get(key.encode()))
        if isinstance(content, dict)
        else None
    )
    if not isinstance(value, kind):
        raise ConfigError(f"{path}: no field {key!r}, which CIFAR files have")
    return value


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _load(path: str) -> Any:
    data = filesystem.read_whole(path, MAX_CIFAR_BYTES)
    try:
        for operation, argument, _ in pickletools.genops(data):
            place = int(argument or 0) if operation.name.endswith("PUT") else 0
            if place > MAX_MEMO:  # room would be made for all before it
                raise ConfigError(
                    f"refused: the pickle requests {place:,} memo entries"
                )
        return _Unpickler(BytesIO(data), encoding="latin1").load()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    # a broken pickle may raise anything; it constructs nothing but stand-ins
    except Exception as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{path} is not an intact CIFAR file ({what})") from None


class _Array:
    """Stands in for a numpy array of bytes. Numpy's own unpickling, with nothing but
    its arrays and types allowed, ended in a segmentation fault within 15,000 damaged
    files.
    """

    pixels = np.empty(0, np.uint8)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        code = getattr(dtype, "code", None)
        if code not in ("u1", "uint8", "|u1", "B"):
            raise ConfigError(f"data must be uint8, not {code}")
        raw = content.encode("latin1") if isinstance(content, str) else content
        self.pixels = np.frombuffer(raw, np.uint8).reshape(
            shape, order="F" if fortran else "C"
        )


class _Type:
    """Stands in for a numpy dtype: keeps its code, ignores its state."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = _text(code)

    def __setstate__(self, state: Any) -> None:
        pass


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ConfigError(f"pickled text in encoding {encoding!r} is refused")
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,  # only ever named, as an argument of _reconstruct
    ("_codecs", "encode"): _encode,
    **{
        (f"{m}.multiarray", "_reconstruct"): _Array
        for m in ("numpy.core", "numpy._core")
    },
    **{
        (f"{m}.numeric", "_frombuffer"): _frombuffer
        for m in ("numpy.core", "numpy._core")
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise ConfigError(
                f"refused: the pickle imports {one_line(f'{module}.{name}')}; CIFAR"
                " files do not"
            )
        return _STAND_INS[module, name]
