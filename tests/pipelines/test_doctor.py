"""``uno doctor`` as a command: its lines and exit codes."""

from pipelines import cli, commands
from tests.pipelines.small import SMALL
from uno.data.files import Storage
from uno.runs import lock
from uno.runs.checkpoint import checkpoint_steps


def run(*argv: str) -> int:
    return cli.run_guarded(commands.doctor, argv)


def test_the_machine(capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run() == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("ok       Python 3.") and "GiB free at" in out and "starts one on this machine" in out
    )
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("UNO_FAULTS", "nan:step=1")
    assert run() == 2
    out = capsys.readouterr().out
    assert (
        "error    no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1" in out and "warning  UNO_FAULTS" in out
    )


def test_a_run_damaged_and_repaired(tmp_path, capsys, monkeypatch):
    """Exit 0 with warnings, 4 without a checkpoint that verifies; a start does the same by itself."""
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    storage, stopped = Storage(str(tmp_path / "run")), tmp_path / "run"
    pretrain = ["pretrain", *SMALL, "--output", str(stopped)]
    assert cli.main(pretrain) == 0
    assert checkpoint_steps(storage, "pretrain") == [6, 9]
    storage.write("checkpoints/pretrain/step_00000009.safetensors", b"{}")
    assert run(str(stopped)) == 0
    what = "it is truncated, or no safetensors file"
    assert f"warning  pretrain step 9: {what}; an older one is used" in capsys.readouterr().out
    assert cli.main(pretrain) == 0
    line = f"warning: removed the damaged checkpoint of pretrain step 9 ({what})"
    assert line in capsys.readouterr().out
    assert checkpoint_steps(storage, "pretrain") == [6, 9]
    assert run(str(stopped)) == 0 and "warning" not in capsys.readouterr().out

    for step in (6, 9):
        storage.write(f"checkpoints/pretrain/step_{step:08d}.safetensors", b"{}")
    assert run(str(stopped), "--repair") == 4
    out = capsys.readouterr().out
    assert "nothing was repaired" in out and "error    none of the 2 checkpoints" in out
    assert cli.main(pretrain) == 4
    assert "use --overwrite" in capsys.readouterr().err


def test_no_run_is_code_2(tmp_path, capsys):
    assert run(str(tmp_path)) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert run("--repair") == 2
    (tmp_path / "config.yaml").write_text("- 1")
    assert run(str(tmp_path)) == 4
    assert "config.yaml is damaged; --repair restores it" in capsys.readouterr().out
