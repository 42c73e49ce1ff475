"""Find problems of a data set before a run starts, also for ``uno data check``."""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from uno.config import Config, Range, clusters_features, override
from uno.data.decode import (
    WHITE_16,
    BadImage,
    Decoding,
    ImageFacts,
    decoded,
    map_images,
)
from uno.data.embeddings import equal_rows
from uno.data.files import read_bytes
from uno.data.images import Image, content_of, evenly_spaced
from uno.data.sampling import by_windows, largest_batch, make_plan, make_pretrain_plan
from uno.data.splits import Task, missing_labels, train_rows
from uno.data.stream import window_rows
from uno.errors import ConfigError, printable
from uno.limits import MAX_IMAGE_BYTES
from uno.text import plural

# Least number of unlabeled rows of a class in a batch. Pseudo-labels get worse below.
MIN_ROWS_PER_CLUSTER = 2.6
# bytes of images that are compared by ``uno data check``, and by a run
MAX_HASHED_BYTES, MAX_HASHED_BYTES_OF_RUN = 2 * 2**30, 256 * 2**20
DARK = 64  # images are nearly black if their brightest pixel is below this, of 255
SHRUNK = 3  # factor by which the shorter side may be reduced without a warning
ORDER_ROWS = 2**18  # rows whose order is checked
NUM_NAMED = 5  # names that a message lists
# Rows are sorted by class if the share of the most frequent class in a batch is larger
# than in batches of shuffled rows by this factor.
SORTED = 1.25
BATCH = 32  # images that are decoded between two looks at the clock
CHECK_SECONDS = 60.0  # time for decoding in ``uno data check`` and in a dry run


class Problem(NamedTuple):
    """Something about the data that a user should know.

    Attributes:
        level: 'error' if the run cannot succeed, 'warning' if it runs but the data is
            suspicious, and 'note' for checks that were not made.
        message: One line that says what is wrong and, if possible, what to do.
    """

    level: str
    message: str


LEVELS = ("error", "warning", "note")


def check(
    task: Task,
    config: Config,
    seconds: float = 0,
    batch_is_derived: bool = False,
    read_images: bool = True,
) -> list[Problem]:
    """Return everything suspicious about a task: errors, then warnings, then notes.

    :func:`check_row_numbers` is given the rows without those that are known to be
    unreadable, because a run leaves them out before it trains. The batches of streamed
    images are checked with all rows, because an unreadable image is replaced within its
    batch. The number of images of each class and the order of the rows are checked with
    all rows, too. Rows are known to be unreadable if all images may be decoded
    (``read_images`` and ``seconds``), or if they are vectors; unreadable images of a
    mere sample still count as rows. Sizes, pages and brightness are checked with a
    sample of at most 64 images, for any ``seconds``. Warnings of the source itself
    (``task.rows.warnings``) are included.

    Args:
        task: The rows and their classes.
        config: The configuration of the run.
        seconds: How long all images may be decoded to find unreadable ones, in seconds.
            Unreadable images are then an error if they are more than
            ``data.max_bad_fraction`` of all rows, else a warning, and about 2 GiB of
            images at most are searched for duplicates, wherever they are stored. With 0
            only the sample is decoded, and about 256 MiB of images at most are searched
            for duplicates, none if any image is in remote storage. It is then an error
            if all images of the sample are unreadable, and a warning if some are. Of
            vectors the sample is all rows, and all are compared in any case.
        batch_is_derived: Whether the batch size was derived from the data. If rows are
            known to be unreadable, the batch of :func:`with_fitting_batch` is then
            checked in place of that of ``config``, as the run derives it again.
        read_images: Whether images are read at all. A run that resumes with unchanged
            data has checked them before. False skips the checks for unreadable images
            or vectors, and those of sizes, pages, brightness and duplicates.

    Raises:
        ConfigError: A file that holds many images cannot be read.
        StorageError: A file of an image cannot be read now, but perhaps later.
    """
    ok, of_images = task.rows.usable, list[Problem]()
    if read_images:
        facts, bad, num_checked = task.rows.image_sample
        if seconds:
            ok, of_images = _decode_within(task, config, seconds)
        elif bad:
            row, reason = next(iter(bad.items()))
            text = (
                f"{len(bad)} of a sample of {num_checked} images are unreadable, e.g."
                f" {task.rows.name_of(row)}: {reason}"
            )
            of_images = [
                Problem("warning" if len(bad) < num_checked else "error", text)
            ]
        of_images += [*_check_sizes(config, facts), *_check_pages(facts)]
        of_images += _check_brightness(facts, config.data.value_range)
        of_images += _check_duplicates(task, in_full=seconds > 0)
    if ok is not None and not ok.all() and batch_is_derived:
        config = with_fitting_batch(config, task, ok)
    problems = [
        *_check_classes(task),
        *check_row_numbers(task, config, ok),
        *of_images,
    ]
    problems += _check_order(task, config)
    problems += [Problem("warning", text) for text in task.rows.warnings]
    return sorted(problems, key=lambda problem: LEVELS.index(problem.level))


def with_fitting_batch(config: Config, task: Task, ok: np.ndarray | None) -> Config:
    """Return the configuration with the largest batch that the readable rows fill.

    The rows fill a batch if an epoch has at least one whole batch. The batch must also
    divide into labeled and unlabeled rows and among the workers. The batch size never
    grows. It stays as it is if it works or no smaller size works, for a run without
    discovery, and for streamed images, because an unreadable one is replaced within its
    batch.

    Args:
        config: The configuration of a run whose batch size was derived from its data.
        task: The rows of the run.
        ok: bool (N,), the rows that can be read; None if all rows count.
    """
    if config.data.loading == "streaming" or not config.discover.epochs:
        return config
    rows, size = train_rows(task, ok), config.train.batch_size
    sizes = len(rows["labeled"]), len(rows["unlabeled"]), config.compute.num_workers
    fitting = largest_batch(config.data.batch_sampling, size, *sizes)
    return (
        override(config, {"train.batch_size": fitting}) if fitting != size else config
    )


def check_row_numbers(
    task: Task, config: Config, ok: np.ndarray | None = None
) -> Iterator[Problem]:
    """Yield problems of the numbers of training rows.

    Three problems are errors: known classes have labeled training rows but none that
    can be read; there are too few unlabeled rows for the classes to discover or for the
    clusters; the batch size does not work, for example because the rows do not fill a
    batch, or because it does not divide among the workers. A warning says that a batch
    has few unlabeled images for the number of classes. For streamed images the batches
    are checked with all rows, readable or not.

    Args:
        task: The rows and their classes.
        config: The configuration of the run.
        ok: bool (N,), the rows that can be read; None if all rows count.
    """
    rows = train_rows(task, ok)
    readable = np.bincount(rows["labels"].numpy(), minlength=task.num_known)
    labels = task.labels[task.is_train & (task.labels >= 0)]
    present = np.bincount(labels, minlength=task.num_known)
    lost = [task.known[c] for c in np.flatnonzero((present > 0) & (readable == 0))]
    if lost:
        few = plural(len(lost), "known class has", "known classes have")
        listed = _list_some(list(map(printable, lost)))
        text = f"{few} no readable training image: {listed}; repair or replace one"
        yield Problem("error", text)
    yield from _check_clusters(task, config, len(rows["unlabeled"]))
    if config.data.loading == "streaming":
        rows = train_rows(task)
    sizes = len(rows["labeled"]), len(rows["unlabeled"])
    yield from _check_batches(task, config, *sizes)


def _list_some(names: list[str], separator: str = ", ") -> str:
    """Join the first names to one text for a message, with "..." for the others.

    Args:
        names: The names, of which the first :data:`NUM_NAMED` (5) are shown.
        separator: The text between two names.
    """
    more = ["..."] if len(names) > NUM_NAMED else []
    return separator.join(names[:NUM_NAMED] + more)


def _check_clusters(task: Task, config: Config, unlabeled: int) -> Iterator[Problem]:
    """Yield an error if there are too few unlabeled rows for the clusters of a run.

    There are too few if they are fewer than the novel classes to discover
    (``task.num_novel``). A method that clusters features in place of training needs
    more unlabeled rows than clusters. Its clusters are the novel classes, and in the
    setting "gcd" the known classes, too. At most one problem is yielded.

    Args:
        task: The rows and their classes.
        config: The configuration of the run.
        unlabeled: Number of readable unlabeled training rows.
    """
    mixed = config.data.setting == "gcd"  # some unlabeled rows are of known classes
    num_novel = task.num_novel
    few = f"fewer unlabeled images ({unlabeled}) than"
    if unlabeled < num_novel:
        fix = "add unlabeled images, or lower --num-novel"
        yield Problem("error", f"{few} classes to discover ({num_novel}); {fix}")
        return
    num_clusters = num_novel + (task.num_known if mixed else 0)
    if clusters_features(config) and unlabeled <= num_clusters:
        known = f"{task.num_known} known + {num_novel} new classes"
        clusters = known if mixed else plural(num_novel, "new class", "new classes")
        text = f"method {config.method} needs more unlabeled images ({unlabeled}) "
        text += f"than clusters ({num_clusters}, for {clusters}); add unlabeled images"
        fix = ", or pass --setting ncd if every unlabeled image is of a new class"
        can_be_ncd = mixed and unlabeled > num_novel
        yield Problem("error", text + fix * can_be_ncd)


def format_report(task: Task, problems: list[Problem], size: int | None = None) -> str:
    """Return the report that ``uno data check`` prints.

    It has the source, the fingerprint, the numbers of images (all, training and test)
    and of classes (known, and to discover), the smallest and the largest size (by the
    number of pixels) and the formats of a sample of images (which is decoded now if it
    was not before; this line is missing if no image can be decoded, and for vectors), a
    table with the numbers of labeled, unlabeled and test rows of each true class (and
    of the rows without a true class, if there are any), the notes of the task, the
    problems, and the numbers of errors and warnings.

    Args:
        task: The rows and their classes.
        problems: The problems that :func:`check` found.
        size: The side of the stored images in pixels that a run uses, for the line
            "used"; None to leave this line out. For a source of vectors the line always
            has their length instead.

    Returns:
        Plain text of several lines, without a line end at its end.

    Raises:
        ConfigError: The sample is decoded now, and a file that holds many images cannot
            be read.
        StorageError: The sample is decoded now, and a file of an image cannot be read,
            but perhaps later.
    """
    rows = task.rows
    headers = [image.header for image in rows.image_sample.readable]
    lines = [
        f"source       {rows.source}",
        f"fingerprint  {rows.fingerprint}",
        (
            f"images       {len(rows)} ({int(task.is_train.sum())} train,"
            f" {int((~task.is_train).sum())} test)"
        ),
        f"classes      {len(task.known)} known, {task.num_novel} to discover",
    ]
    if headers:
        kinds = Counter(header.format for header in headers).most_common()
        formats = ", ".join(f"{number} {name}" for name, number in kinds)
        sides = sorted((h.width * h.height, f"{h.width} x {h.height}") for h in headers)
        sizes = f"{sides[0][1]} to {sides[-1][1]} pixels"
        lines.append(f"sizes        {sizes} ({formats}; sample of {len(headers)})")
    if rows.vectors is not None:
        lines.append(f"used         as vectors of {rows.vectors[0].shape[2]} numbers")
    elif size is not None:
        lines.append(f"used         as {size} x {size} pixels (--data.stored-size)")
    names = [printable(name) for name in task.known + task.novel] + ["(no truth)"]
    kinds_of = ["known"] * len(task.known) + ["novel"] * len(task.novel) + [""]
    width = min(max(map(len, names)), 40)
    lines += [
        "",
        f"{'class':<{width}}  kind   {'labeled':>8} {'unlabeled':>10} {'test':>8}",
    ]
    for name, kind, (labeled, unlabeled, test) in zip(
        names, kinds_of, _count_rows(task).tolist(), strict=True
    ):
        if kind or labeled or unlabeled or test:
            lines.append(
                f"{name[:width]:<{width}}  {kind:<5}  {labeled:>8} {unlabeled:>10}"
                f" {test:>8}"
            )
    lines += ["", *(f"note: {note}" for note in task.notes)]
    lines += [f"{level}: {message}" for level, message in problems]
    counts = Counter(problem.level for problem in problems)
    errors, warnings = (plural(counts[level], level) for level in LEVELS[:2])
    return "\n".join([*lines, f"{errors}, {warnings}"])


def _count_rows(task: Task) -> np.ndarray:
    """Count the labeled, unlabeled and test rows of each true class.

    Args:
        task: The rows and their classes.

    Returns:
        int64 (C + 1, 3): a row for each of the C known and novel classes, and a last
        one for rows without a true class; columns for labeled training rows, unlabeled
        training rows and test rows.
    """
    counts = np.zeros((len(task.known) + len(task.novel) + 1, 3), dtype=np.int64)
    column = np.where(~task.is_train, 2, np.where(task.labels >= 0, 0, 1))
    np.add.at(counts, (task.eval_labels, column), 1)
    return counts


def _check_classes(task: Task) -> Iterator[Problem]:
    """Yield problems of the names of classes and of the numbers of their rows.

    Warnings name classes that differ only in case or spaces, known classes that seem to
    stand for a missing label, such as "unknown", and classes that have no training
    image or a single one, and say that there is only one known class. It is an error
    instead if known classes have no training image. Training images are counted by
    their true class, labeled or not, and readable or not.

    Args:
        task: The rows and their classes.
    """
    seen: dict[str, str] = {}
    for name in task.known + task.novel:
        other = seen.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            yield Problem(
                "warning",
                f"classes {other!r} and {name!r} differ only in case or spaces",
            )
    for name in missing_labels(task.known):
        text = (
            f"class {name!r} seems to stand for a missing label: leave such labels"
            " empty"
        )
        yield Problem("warning", text)
    if task.num_known == 1:
        text = (
            f"only one known class, {task.known[0]!r}: how classes differ cannot be"
            " learned from it"
        )
        yield Problem("warning", text)
    in_training = _count_rows(task)[:-1, :2].sum(axis=1)
    names = list(map(printable, task.known + task.novel))
    is_known = np.arange(len(names)) < task.num_known
    for kind, of_kind in (("known", is_known), ("novel", ~is_known)):
        for num, what in enumerate(("no training image", "a single training image")):
            found = [names[c] for c in np.flatnonzero(of_kind & (in_training == num))]
            if found:
                level = "error" if kind == "known" and num == 0 else "warning"
                few = plural(len(found), f"{kind} class has", f"{kind} classes have")
                yield Problem(level, f"{few} {what}: {_list_some(found)}")


def _check_batches(
    task: Task, config: Config, labeled: int, unlabeled: int
) -> Iterator[Problem]:
    """Yield problems of filling the batches of the phases that are trained.

    The batches of discovery are checked if it has epochs. Otherwise the batches of
    pretraining are checked, if it has epochs and no weights are given. What
    :func:`~uno.data.sampling.make_plan` or
    :func:`~uno.data.sampling.make_pretrain_plan` refuses is an error: for example the
    rows do not fill a batch, or the batch does not divide among the workers. For
    discovery, a warning says that a batch has fewer than :data:`MIN_ROWS_PER_CLUSTER`
    (2.6) unlabeled images for each novel class (in the setting "gcd" for each known and
    novel class). At most one problem is yielded.

    Args:
        task: The rows and their classes.
        config: The configuration of the run.
        labeled: Number of labeled training rows.
        unlabeled: Number of unlabeled training rows.
    """
    size, workers = config.train.batch_size, config.compute.num_workers
    mixed = config.data.setting == "gcd"
    num_classes = task.num_novel + (task.num_known if mixed else 0)
    sampling, plan = config.data.batch_sampling, None
    try:
        if config.discover.epochs:
            plan = make_plan(config.seed, sampling, size, labeled, unlabeled, workers)
        elif config.model.weights is None and config.pretrain.epochs:
            make_pretrain_plan(config.seed, size, labeled, workers)
    except ConfigError as error:
        yield Problem("error", str(error))
        return
    if plan is None:
        return
    each = plan.unlabeled_size / num_classes
    if each < MIN_ROWS_PER_CLUSTER:
        num = plural(plan.unlabeled_size, "unlabeled image")
        text = f"a batch has {num} for {num_classes} classes, {each:.1f} each; "
        text += f"pseudo-labels need {MIN_ROWS_PER_CLUSTER} or more: raise batch_size"
        yield Problem("warning", text)


def _check_order(task: Task, config: Config) -> Iterator[Problem]:
    """Yield a warning if streamed images are sorted by class.

    Images that are stored together are read together and mixed only with those read at
    about the same time. If they are sorted by class, a batch has images of few classes.
    Training rows are put into a random order of the kind in which a run reads them. The
    mean share of the most frequent true class in batches of this order is compared with
    the mean share in batches of shuffled rows. Rows without a true class are not
    counted. The warning comes if the first share is more than :data:`SORTED` (1.25)
    times the second. Of more than :data:`ORDER_ROWS` (262,144) training rows only some
    groups are examined. Images that are not streamed, or are read one by one, are not
    checked. No image is read here.

    Args:
        task: The rows and their classes.
        config: The configuration of the run.
    """
    images, members = task.rows.images, np.flatnonzero(task.is_train)
    groups = images.groups(members)
    if groups is None or config.data.loading != "streaming":
        return
    # Of many rows only some groups are checked, with all of their rows.
    seen = groups % -(-len(members) // ORDER_ROWS) == 0
    classes = task.eval_labels[members[seen]]
    random, size = np.random.default_rng(config.seed), config.train.batch_size
    order = by_windows(groups[seen], window_rows(images), random)
    share = measure_largest_share(classes[order], size)
    shuffled_share = measure_largest_share(random.permutation(classes), size)
    if share > SORTED * shuffled_share:
        yield Problem(
            "warning",
            "images are sorted by class: when streamed, one class has"
            f" {share:.0%} of a batch ({shuffled_share:.0%} if shuffled), which breaks"
            " clustering with equal sizes; shuffle with uno data pack",
        )


def measure_largest_share(classes: np.ndarray, size: int) -> float:
    """Return the mean share of the most frequent class in batches.

    Args:
        classes: int64 (N,), the class of each row in the order of training. Rows of
            class -1, which have none, are not counted.
        size: Number of rows of a batch. The last batch can be smaller.

    Returns:
        A number from 0 to 1: the mean over the batches in which a row has a class, each
        with the same weight. It is 0 if no row has a class.
    """
    batches = np.split(classes, range(size, len(classes), size))
    counts = [np.bincount(batch[batch >= 0], minlength=1) for batch in batches]
    shares = [count.max() / count.sum() for count in counts if count.any()]
    return float(np.mean(shares)) if shares else 0.0


def _check_sizes(config: Config, facts: Sequence[ImageFacts]) -> Iterator[Problem]:
    """Yield a warning if images are reduced so much that most detail is lost.

    That is the case if their median shorter side is more than :data:`SHRUNK` (3) times
    the side that the run uses: the smaller one of the sides of the stored square
    (``data.stored_size``) and of a large view (``augment.large.size``). There is no
    warning for an empty sample.

    Args:
        config: The configuration of the run.
        facts: What decoding has shown about each readable image of a sample, of which
            the width and height are used.
    """
    side = min(config.data.stored_size, config.augment.large.size)
    sides = [min(image.header.width, image.header.height) for image in facts]
    median_side = int(np.median(sides or [side]))
    if median_side > SHRUNK * side:
        yield Problem(
            "warning",
            f"images of about {median_side} px are resized to {side} px, which loses"
            " most detail; raise --image-size (slower)",
        )


def _check_pages(facts: Sequence[ImageFacts]) -> Iterator[Problem]:
    """Yield a warning if some of a sample of images are TIFFs with several pages.

    Args:
        facts: What decoding has shown about each readable image of the sample,
            including whether it has further pages.
    """
    several = sum(image.has_pages for image in facts)
    if several:
        yield Problem(
            "warning",
            f"{several} of a sample of {len(facts)} images have several pages, of"
            " which the first is used; save each other page as an image of its own",
        )


def _check_brightness(
    facts: Sequence[ImageFacts], value_range: Range | None
) -> Iterator[Problem]:
    """Yield a warning if all images of a sample are nearly black.

    They are if the brightest pixel of all of them is below :data:`DARK` (64) of 255.
    The values of gray images of more than 8 bits are scaled before, so that ``low``
    becomes 0 and ``high`` becomes 255. There is no warning for an empty sample.

    Args:
        facts: What decoding has shown about each readable image of a sample, including
            its largest value.
        value_range: The stored values (low, high) that become black and white in gray
            images of more than 8 bits; None for 0 and 65535.
    """
    low, high = value_range or (0, WHITE_16)
    scaled = [
        image.brightest
        if image.deep_values is None
        else (image.brightest - low) * 255 / (high - low)
        for image in facts
    ]
    largest = int(max(scaled, default=255))
    if largest < DARK:
        yield Problem(
            "warning",
            f"images are nearly black: the brightest pixel of {len(facts)} images is"
            f" {largest} of 255; --data.value-range LOW HIGH sets black and white of"
            " gray images with more than 8 bits; save color images with 8 bits",
        )


def _decode_within(
    task: Task, config: Config, seconds: float
) -> tuple[np.ndarray, list[Problem]]:
    """Decode the images as a run would, until the time is up. No pixels are kept.

    Args:
        task: The rows.
        config: The configuration of the run.
        seconds: The time limit, which is checked before each batch of 32 images.

    Returns:
        bool (N,), False for each image that was found to be unreadable, and True for
        images that were not decoded, too; and at most two problems: that images are
        unreadable, an error if they are more than ``data.max_bad_fraction`` of all N
        rows and a warning otherwise; and a warning that not all images were decoded.

    Raises:
        ConfigError: A file that holds many images cannot be read.
        StorageError: A file of an image cannot be read now, but perhaps later.
    """
    num, end, num_decoded = len(task.rows), time.monotonic() + seconds, 0
    size, threads = config.data.stored_size, config.compute.threads
    how = Decoding.of(config.data)
    starts = (i for i in range(0, num, BATCH) if time.monotonic() < end)
    batches = (np.arange(i, min(i + BATCH, num)) for i in starts)
    ok, bad, problems = np.ones(num, dtype=bool), list[str](), list[Problem]()
    for rows, _, reasons in decoded(task.rows.images, batches, size, threads, how):
        num_decoded += len(rows)
        for row, reason in zip(rows.tolist(), reasons, strict=True):
            if reason is not None:
                ok[row] = False
                bad.append(f"{task.rows.name_of(row)}: {reason}")
    if bad:
        listed = _list_some(bad, "; ")
        text = f"{len(bad)} of {num_decoded} images cannot be read: {listed}"
        if too_many := len(bad) > config.data.max_bad_fraction * num:
            text += "; more than --data.max-bad-fraction, so a run would stop"
        problems.append(Problem("error" if too_many else "warning", text))
    if num_decoded < num:
        text = f"{num_decoded:,} of {num:,} images were decoded in {seconds:g} s"
        problems.append(Problem("warning", f"{text}; the others were not checked"))
    return ok, problems


def _check_duplicates(task: Task, in_full: bool) -> Iterator[Problem]:
    """Yield warnings about exact copies of images, which have equal bytes or pixels.

    Copies are reported if some are training and some are test images, or if they are
    training images under different known labels. There is one warning for each of the
    two, with the number of groups of copies. A note says how many images were compared,
    if not all that could be copies were.

    Args:
        task: The rows and their classes.
        in_full: Whether about 2 GiB of images at most are compared, also from remote
            storage. Otherwise about 256 MiB at most are compared, and nothing if any
            image is in remote storage. For a source of vectors the first views of all
            rows are compared in any case.

    Raises:
        ConfigError: A file that holds many images cannot be read.
    """
    groups, note = _find_copies(task, in_full)
    found: dict[str, list[list[int]]] = defaultdict(list)
    for group in groups:
        if len(set(task.is_train[group])) == 2:
            found["duplicates in train and test"].append(group)
        if len(set(task.labels[group]) - {-1}) > 1:
            found["duplicates with different known labels"].append(group)
    for text, copies in found.items():
        example = " = ".join(task.rows.name_of(i) for i in copies[0][:3])
        yield Problem("warning", f"{text}: {len(copies)}, e.g. {example}")
    if note:
        yield Problem("note", note)


def _find_copies(task: Task, in_full: bool) -> tuple[list[list[int]], str]:
    """Find rows with equal content.

    Of images that are not stored together, only those are read that have the same size
    as another one. Such an image is left out if its size is unknown, as that of a
    remote file that a table names, or if it has more than ``MAX_IMAGE_BYTES`` (128
    MiB). Images that are stored together, such as in a row group, are compared whatever
    their sizes are. If all these images have more bytes than the limit, only a share of
    them is compared: all images of some sizes or, where images are stored together,
    whole groups. If the limit does not allow one size or group, evenly spaced single
    images are compared. Images that cannot be read have no copies. For a source of
    vectors the first views of all rows with a usable vector are compared, without a
    limit.

    Args:
        task: The rows.
        in_full: Whether about 2 GiB of images at most are read, also from remote
            storage. Otherwise about 256 MiB at most are read, and nothing if any image
            is in remote storage.

    Returns:
        Groups of two or more row numbers with equal content, each ascending; and a text
        that says how many of the images that could be copies were compared, '' if
        neither the limit nor an unknown size of a remote image left any out.

    Raises:
        ConfigError: A file that holds many images cannot be read.
    """
    images, rows = task.rows.images, np.arange(len(task.rows))
    if task.rows.vectors is not None:
        values, reasons = task.rows.vectors
        copies = equal_rows(values[:, 0])
        return [group for group in copies if reasons[group[0]] is None], ""
    keys = images.groups(rows)  # equal for images that are stored together
    sizes = images.sizes(rows)
    num_unknown = int((sizes < 0).sum()) if images.is_remote else 0
    if keys is None:  # the sizes are those of the images, and not means of a group
        _, same, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        kept = (sizes >= 0) & (sizes <= MAX_IMAGE_BYTES) & (counts[same] > 1)
        rows, sizes, keys = rows[kept], sizes[kept], sizes[kept]
    limit = MAX_HASHED_BYTES if in_full else MAX_HASHED_BYTES_OF_RUN
    if images.is_remote and not in_full:
        limit = 0
    chosen = _sample_by_key(keys, sizes, limit)
    groups: dict[bytes, list[int]] = defaultdict(list)
    for row, digest in map_images(images, rows[chosen], _hash_image):
        if isinstance(digest, bytes):
            groups[digest].append(row)
    note, total = "", len(rows) + num_unknown
    if len(chosen) < total:
        note = f"{len(chosen):,} of {total:,} images were searched for duplicates"
        if num_unknown:
            note += "; the size of remote images that a table names is not known"
        elif not in_full:
            note += "; uno data check compares up to 2 GiB"
    return [sorted(group) for group in groups.values() if len(group) > 1], note


def _sample_by_key(keys: np.ndarray, sizes: np.ndarray, limit: int) -> np.ndarray:
    """Choose rows with about ``limit`` bytes in all, either all rows of a key or none.

    Keys are chosen evenly spaced in their sorted order, as large a share of them as
    ``limit`` is of all bytes, rounded down. So the chosen rows may have more or fewer
    bytes than ``limit``. If all rows have no more bytes than that, all are chosen.

    Args:
        keys: (n,), equal for rows that are to be chosen together.
        sizes: int64 (n,), the number of bytes of each row.
        limit: The number of bytes; 0 chooses no row.

    Returns:
        int64 (m,), ascending positions of the chosen rows among the n rows. If the
        share is less than one key, the same share of the rows is chosen instead, as
        evenly spaced single rows, whatever their keys are.
    """
    share = limit / max(1, int(sizes.sum()))
    if share >= 1:
        return np.arange(len(keys))
    distinct, number = np.unique(keys, return_inverse=True)
    chosen = evenly_spaced(int(share * len(distinct)), len(distinct))
    if not len(chosen):
        return evenly_spaced(int(share * len(keys)), len(keys))
    return np.flatnonzero(np.isin(number, chosen))


def _hash_image(image: Image) -> bytes:
    """Hash an encoded image by its stored bytes, and an array by its shape and pixels.

    An image is not decoded, so one with broken pixels has a hash, too. Of a file of
    more than ``MAX_IMAGE_BYTES`` only the first ``MAX_IMAGE_BYTES`` + 1 bytes are read.

    Args:
        image: Encoded bytes, the path or URI of a file, which is read, or pixels uint8
            (H, W, 3).

    Returns:
        16 bytes (BLAKE2b) that are equal for images with equal content.

    Raises:
        BadImage: The file of the image cannot be read, or the image is empty.
    """
    try:
        if isinstance(image, str):
            content = read_bytes(image, MAX_IMAGE_BYTES)
        else:
            content = content_of(image)
    except (OSError, ValueError) as error:
        raise BadImage(str(error)) from None
    if not content:
        raise BadImage("no image data")
    return hashlib.blake2b(content, digest_size=16).digest()
