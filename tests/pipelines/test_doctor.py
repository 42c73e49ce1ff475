"""``uno doctor`` as a command: its lines and exit codes."""

import pytest

from pipelines import cli, commands, doctor
from tests.pipelines.raylets import Command, head


def run(*argv: str) -> int:
    return cli.run_guarded(commands.doctor, argv)


def test_the_machine(capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run() == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("ok       Python 3.")
        and "GiB free at" in out
        and "starts one on this machine" in out
    )
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert run() == 2
    out = capsys.readouterr().out
    assert "error    no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1" in out


MINE = {"Python": "3.11", "torch": "2.15"}
NODE = {"NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 8.0, "GPU": 1.0}}
FACTS = {
    "host": "n2",
    "versions": MINE,
    "sees": True,
    "gpus": ["A10G"],
    "cuda": "13.2",
    "efa": 0,
    "plugin": "none",
    "late": 0.01,
}


@pytest.mark.parametrize(
    ("changed", "speed", "level", "says"),
    [
        (
            {},
            9.8e9,
            "ok",
            "n2: 8 CPUs, 1 x A10G, CUDA 13.2; sees the directory; all-reduce 9.8 GB/s",
        ),
        (
            {"versions": {"Python": "3.11", "torch": "2.14"}},
            None,
            "error",
            "torch 2.14, here 2.15",
        ),
        ({"versions": {"Python": "3.11"}}, None, "error", "torch none, here 2.15"),
        ({"gpus": []}, None, "error", "Ray counts 1 GPUs, PyTorch sees 0"),
        ({"sees": False}, None, "error", "does not see the directory"),
        ({"late": -5.0}, None, "warning", "its clock is -5.0 s off"),
        (
            {"efa": 32},
            None,
            "warning",
            "32 EFA cards and no libnccl-net.so: NCCL uses sockets",
        ),
        ({"efa": 32, "plugin": "ok"}, None, "ok", "32 EFA cards"),
        (
            {"plugin": "/x/libnccl-net.so lacks libhwloc.so.15"},
            None,
            "warning",
            "lacks libhwloc.so.15",
        ),
        ({}, "no answer in 60 s", "warning", "no all-reduce: no answer in 60 s"),
    ],
)
def test_a_line_says_what_is_wrong_with_a_node(changed, speed, level, says):
    found = doctor.line_of(NODE, {**FACTS, **changed}, MINE, speed)
    assert (found.level, says in found.text) == (level, True), found
    assert found.text.startswith("10.0.0.2 n2: ")
    assert doctor.line_of(NODE, "no answer in 60 s", MINE, None).level == "error"


def test_the_plugin_that_nccl_finds(tmp_path, monkeypatch):
    """Kills: a plugin whose libraries are not there taken for one that works."""
    assert (
        doctor.plugin(str(tmp_path)) == "none"
        and doctor.efa_devices(str(tmp_path / "no")) == []
    )
    (tmp_path / "libnccl-net.so").write_bytes(b"")
    for told, expected in (
        ("libc.so.6 => /lib/libc.so.6\n", "ok"),
        ("\tlibhwloc.so.15 => not found\n", "lacks"),
    ):
        run = lambda *_, told=told, **__: type("Done", (), {"stdout": told})  # noqa: E731
        monkeypatch.setattr(doctor.subprocess, "run", run)
        assert expected in doctor.plugin(str(tmp_path))


def test_a_cluster_is_needed(capsys, monkeypatch):
    monkeypatch.setattr("pipelines.ray_env.cluster_address", lambda: None)
    assert run("--cluster") == 2 and "RAY_ADDRESS=HOST:6379" in capsys.readouterr().err
    assert run("some-directory") == 2 and "--cluster" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.release
def test_every_node_says_what_it_sees(tmp_path):
    """Two machines, of which one does not see the directory. Kills: the head's answer
    for all, a node left out, an all-reduce of one node, a token that stays.
    """
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    with head(2) as raylets:
        raylets.join(1, hidden)
        words = ["pipelines", "doctor", str(tmp_path / "shared"), "--cluster"]
        told = Command(words, raylets.env, tmp_path / "log")
        assert told.end() == 0, told.lines
        lines = [line for line in told.lines if line.startswith("ok ")]
        assert len(lines) == 2 and all(
            "sees the directory; all-reduce" in line for line in lines
        ), lines
        assert sum("(head)" in line for line in lines) == 1 and not list(
            (tmp_path / "shared").iterdir()
        )
        if raylets.real:
            unseen = Command(
                ["pipelines", "doctor", str(hidden), "--cluster"],
                raylets.env,
                tmp_path / "log2",
            )
            assert (
                unseen.end() == 2 and unseen.count("does not see the directory") == 1
            ), unseen.lines
