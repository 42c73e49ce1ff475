"""Continued use: new classes that you confirm are known ones of the next run, on the
next unlabeled images.

    python examples/continued.py KNOWN FIRST SECOND RUN NUM_FIRST NUM_SECOND [YAML]

Folders of images in one folder for each class. Those of FIRST stand for your eyes: half
of the new classes are confirmed under the name that most of their images have. And they
say at the end what was forgotten. No run reads the folders' names of FIRST and SECOND.
YAML: options of uno discover.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path

import uno


def main(
    known: str,
    first: str,
    second: str,
    run: str,
    num_first: str,
    num_second: str,
    *options: str,
) -> tuple[float, float]:
    """Both runs. Returns the share of FIRST's images of confirmed classes that is
    right before and after.
    """
    own, grown = {"config": list(options)} if options else {}, Path(run, "known")
    model = uno.discover(
        labeled=known,
        unlabeled=first,
        num_novel=int(num_first),
        output=f"{run}/1",
        **own,
    )
    images = sorted(path for path in Path(first).rglob("*") if path.is_file())
    found, truth = (
        [row.class_name for row in model.predict(images)],
        [path.parent.name for path in images],
    )
    confirmed = confirm(
        [row.name for row in model.classes if row.kind == "novel"], found, truth
    )
    shutil.copytree(known, grown, dirs_exist_ok=True)
    # as `uno predict --folders` sorts them
    for image, name in zip(images, found, strict=True):
        if name in confirmed:
            folder = grown / confirmed[name]
            folder.mkdir(exist_ok=True)
            shutil.copy(image, folder / f"{name}-{image.parent.name}-{image.name}")
    next_model = uno.discover(
        labeled=str(grown),
        unlabeled=second,
        num_novel=int(num_second),
        output=f"{run}/2",
        **own | {"weights": f"{run}/1/model/encoder.safetensors"},
    )
    now = [row.class_name for row in next_model.predict(images)]
    before, after = (
        right(names, truth, confirmed.values())
        for names in ([confirmed.get(n, n) for n in found], now)
    )
    print(
        "confirmed:",
        ", ".join(f"{name} as {called}" for name, called in confirmed.items()),
    )
    print(
        f"their images in {first}: {before:.1%} right after the first run, {after:.1%}"
        " after the second"
    )
    return before, after


def confirm(
    novel: Sequence[str], found: Sequence[str], truth: Sequence[str]
) -> dict[str, str]:
    """The larger half of the ``novel`` classes, with the names that most of their
    images have.
    """
    images = {
        name: Counter(t for t, f in zip(truth, found, strict=True) if f == name)
        for name in novel
    }
    largest = sorted(novel, key=lambda name: -images[name].total())[: len(novel) // 2]
    return {name: images[name].most_common(1)[0][0] for name in largest if images[name]}


def right(found: Sequence[str], truth: Sequence[str], classes: Container[str]) -> float:
    """Share of the images of ``classes`` that are called by their names."""
    pairs = [(f, t) for f, t in zip(found, truth, strict=True) if t in classes]
    return sum(f == t for f, t in pairs) / max(1, len(pairs))


if __name__ == "__main__":
    main(*sys.argv[1:])
