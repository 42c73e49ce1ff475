"""``compute.compile``: the same training with a compiled encoder, one clear line
where nothing compiles.
"""

import os
import shutil
from unittest.mock import Mock, create_autospec

import pytest
import torch

from tests.uno.data.builders import failure
from tests.uno.small_run import (
    batches_of,
    discovery_step,
    fresh_state,
    small_config,
    train_both,
)
from uno.runs import hardware, run

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def test_a_missing_compiler_is_one_line(monkeypatch, storage):
    """Kills: a traceback of torch's in the first step, a silent fall-back to the
    plain encoder.
    """
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    line = failure(train_both, small_config(compute__compile=True), storage)
    assert "needs a C++ compiler" in line


@pytest.mark.parametrize("compiled", [False, True])
def test_the_encoder_of_both_phases_is_compiled_on_request(
    monkeypatch, storage, compiled
):
    """Kills: an option that nothing reads, heads compiled with it."""
    compile_ = create_autospec(torch.nn.Module.compile)
    monkeypatch.setattr(run, "prepare_compiler", lambda: None)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    config = small_config(compute__compile=compiled, train__max_steps=1)
    state = train_both(config, storage)
    assert compile_.call_count == (2 if compiled else 0)
    assert not compiled or compile_.call_args.args == (state.model.encoder,)


@COMPILER
def test_compiled_code_stays_on_its_kind_of_processor(monkeypatch):
    """Kills: code for one processor's vectors run on another, which gives NaN; a
    user's own folder left.
    """
    folders = []
    for flags in ("sse2 avx2", "sse2 avx2 avx512f", "sse2 avx2"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
        monkeypatch.setattr(hardware, "_processor_field", Mock(return_value=flags))
        hardware.prepare_compiler()
        hardware.prepare_compiler()
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert [os.path.dirname(folder) for folder in folders] == ["/mine"] * 3
    assert folders[0] == folders[2] != folders[1]


@pytest.mark.release
@COMPILER
def test_compiled_steps_are_the_same_steps(monkeypatch, tmp_path):
    """10 steps in float64: in float32 the order of summation tells after a few, and
    differs by processor.

    Kills: an encoder that is compiled in eval mode, or whose parameters are renamed or
    copied.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config, losses = small_config(), []
    for compiled in (False, True):
        state = fresh_state(config, dtype=torch.float64)
        names = list(state.model.state_dict())
        if compiled:
            state.model.encoder.compile(dynamic=False)
        batches = map(batches_of(config), range(10))
        doubles = [
            batch._replace(views=[view.double() for view in batch.views])
            for batch in batches
        ]
        losses.append(
            torch.cat([discovery_step(state, b, config, 0.005) for b in doubles])
        )
        assert list(state.model.state_dict()) == names
    torch.testing.assert_close(*losses, atol=1e-9, rtol=0)
    assert losses[0][0] - losses[0][-1] > 0.1  # it learns
