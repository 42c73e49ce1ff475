"""``compute.compile``: the same training with a compiled encoder, one clear line where nothing compiles."""

import shutil

import pytest
import torch

from tests.uno.small_run import batches_of, fresh_state, small_config, train_both
from uno import hardware, run
from uno.errors import ConfigError
from uno.steps import discovery_step
from uno.storage import Storage


def test_a_missing_compiler_is_one_line(monkeypatch, tmp_path):
    """Kills: a traceback of torch's in the first step, a silent fall-back to the plain encoder."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compute\.compile needs a C\+\+ compiler"):
        train_both(small_config(compute__compile=True), Storage(str(tmp_path)))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_encoder_of_both_phases_is_compiled_on_request(monkeypatch, tmp_path, compiled):
    """Kills: an option that nothing reads, heads compiled with it."""
    seen = []
    monkeypatch.setattr(run, "require_compiler", lambda: None)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: seen.append(module))
    state = train_both(small_config(compute__compile=compiled), Storage(str(tmp_path)))
    assert len(seen) == (2 if compiled else 0)
    assert not compiled or seen[-1] is state.model.encoder


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_steps_are_the_same_steps(one_thread):
    """10 steps of discovery, losses within 2e-5; then other orders of summation tell, as they do for another
    memory layout.

    Kills: an encoder that is compiled in eval mode, or whose parameters are renamed or copied.
    """
    losses = []
    for compiled in (False, True):
        state = fresh_state(small_config())
        names = list(state.model.state_dict())
        if compiled:
            state.model.encoder.compile()
        batches = batches_of(small_config())
        steps = [discovery_step(state, batches(i), small_config().objective, 0.005) for i in range(10)]
        losses.append(torch.cat(steps))
        assert list(state.model.state_dict()) == names
    torch.testing.assert_close(*losses, atol=2e-5, rtol=0)
    assert losses[0][0] - losses[0][-1] > 0.1  # it learns
