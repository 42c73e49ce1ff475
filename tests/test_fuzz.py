"""The fuzz lane itself, and a slice of it."""

import os
import signal
import time
from itertools import islice

import pytest

from tests import fuzz
from tests.fuzz import CORPUS, KINDS, Kind, inputs_of, run_batch
from uno.errors import ConfigError


def misbehave(folder, data):
    """As told by the first letter."""
    if data.startswith(b"k"):
        os.kill(os.getpid(), signal.SIGSEGV)
    elif data.startswith(b"h"):
        time.sleep(60)
    elif data.startswith(b"m"):
        bytearray(3 * 2**30)
    elif data.startswith(b"t"):
        raise IndexError("out of range")
    elif data.startswith(b"l"):
        raise ConfigError("two\nlines")
    elif data.startswith(b"r"):
        raise ConfigError("one line")


def test_every_misbehavior_is_a_finding_and_the_next_input_is_read(monkeypatch):
    """Kills: a child whose death hides the rest of its batch, a cap that does not
    hold.
    """
    monkeypatch.setattr(fuzz, "SLOW_S", 1)
    batch = [letter.encode() for letter in "xkrhmtlx"]
    found = [what for what, _ in run_batch(Kind(list, misbehave), batch)]
    assert found[:4] == ["read", "SIGSEGV", "refused", "over 1 s"]
    assert (
        found[4].startswith("MemoryError") and found[5] == "IndexError: 'out of range'"
    )
    assert found[6].startswith("not one line") and found[7:] == ["read"]


@pytest.mark.parametrize("kind", ["png", "yaml", "csv", "bmp", "tar"])
def test_inputs_are_a_function_of_the_seed_and_the_seeds_are_read(kind):
    """Kills: a run that cannot be repeated; seeds that no reader takes, so that
    mutants prove nothing.
    """
    first, again, other = (inputs_of(kind, seed) for seed in (1, 1, 2))
    assert [next(first) for _ in range(40)] == [next(again) for _ in range(40)]
    assert [next(first) for _ in range(9)] != [next(other) for _ in range(9)]
    seeds = KINDS[kind].seeds()
    assert {what for what, _ in run_batch(KINDS[kind], seeds)} == {"read"}


def test_pieces_make_the_whole_and_only_what_is_slow_twice_is_a_finding(monkeypatch):
    """Kills: a piece that begins elsewhere, a busy machine as a finding, a hang that
    is forgiven.
    """
    whole, asked = list(islice(inputs_of("yaml", 0), 6)), []
    slow, hang = whole[3], whole[4]

    def run(kind, batch):
        asked.append(batch)
        late = (slow, hang) if len(batch) > 1 else (hang,)
        return [("over 10 s" if data in late else "read", 0.1) for data in batch]

    monkeypatch.setattr(fuzz, "run_batch", run)
    found = fuzz.fuzz("yaml", 4, seed=0, first=2)
    assert asked == [whole[2:], [slow], [hang]]
    assert found["read"] == 3 and found["findings"] == ["input 4: over 10 s"]


def test_past_failures_stay_repaired():
    """Kills: a repair that is undone; a file in the corpus that belongs to no kind."""
    # those are test_agreement's
    files = sorted(set(CORPUS.iterdir()) - set(CORPUS.glob("agreement_*")))
    names = {name.replace(", ", "-"): name for name in KINDS}
    for path in files:
        kind = KINDS[names[path.name.partition("_")[0]]]
        kind.seeds()  # here: what they need is made once
        ((what, seconds),) = run_batch(kind, [path.read_bytes()])
        assert what in ("read", "refused") and seconds < 5, (path, what)
    assert files


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_slice(kind):
    """Half a minute for all kinds together, the same inputs every time."""
    found = fuzz.fuzz(kind, 500, seed=0, seconds=30 / len(KINDS))
    assert found["findings"] == [] and found["inputs"] >= fuzz.BATCH, found
