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
}


@pytest.mark.parametrize(
    ("changed", "level", "says"),
    [
        ({}, "ok", "n2: 8 CPUs, 1 x A10G, CUDA 13.2; sees the directory"),
        ({"versions": {"Python": "3.11"}}, "error", "torch none, here 2.15"),
        ({"gpus": []}, "error", "Ray counts 1 GPUs, PyTorch sees 0"),
        ({"sees": False}, "error", "does not see the directory"),
    ],
)
def test_a_line_says_what_is_wrong_with_a_node(changed, level, says):
    found = doctor.finding_of_node(NODE, {**FACTS, **changed}, MINE)
    assert (found.level, says in found.text) == (level, True), found
    assert found.text.startswith("10.0.0.2 n2: ")
    silent = doctor.finding_of_node(NODE, "no answer in 60 s", MINE)
    assert silent.level == "error"


def test_a_cluster_is_needed(capsys, monkeypatch):
    monkeypatch.setattr("pipelines.ray_env.cluster_address", lambda: None)
    assert run("--cluster") == 2 and "RAY_ADDRESS=HOST:6379" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.release
def test_every_node_says_what_it_sees(tmp_path):
    """One of two machines does not see the directory. Kills: the head's answer for all
    nodes, a node left out, a file that stays.
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
            "sees the directory" in line for line in lines
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
