"""What do the loggers and the counts of ``uno.pace`` cost a step?

    python -m benchmarks.loggers --preset cifar10 --batch 64 --steps 20 --repeats 9

prints one JSON row. Steps of discovery alone and the same steps as a run takes them
take turns (A B A B): with the hook and the collective of ``Pace``, and every tenth step
(``train.log_every`` of a run) a line to ``metrics.jsonl``, TensorBoard,
W&B (offline) and MLflow (a local folder), as far as they are installed. ``ratio`` is
the median over pairs of turns, with the interval that has 95 % of its bootstrap
samples; 1.01 at most is asked for.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.measure import environment, medians, spread, take_turns
from benchmarks.step import train_set
from uno.config import override
from uno.data.files import Storage
from uno.data.plan import make_plan
from uno.data.resident import ResidentBatches
from uno.model import build_model
from uno.objective import discovery_step
from uno.pace import Pace
from uno.presets import PRESETS, preset
from uno.runs import DISCOVER
from uno.runs.journal import Journal
from uno.session.loggers import LOGGERS, Loggers
from uno.state import new_state
from uno.train import Phase, _collect_metrics_

EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="cifar10")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(measure(options)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The row; ``options`` as of :func:`main`."""
    device, names = (
        torch.device(options.device),
        [n for n, (p, _) in LOGGERS.items() if find_spec(p)],
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns",
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }
        own = {"train.batch_size": options.batch, "train.report_to": ",".join(names)}
        config, storage = override(preset(options.preset), own), Storage(folder)
        train = train_set(None, config).to(device)
        plan = make_plan(
            0,
            "proportional",
            options.batch,
            len(train.labels),
            len(train.unlabeled_images),
        )
        batches = ResidentBatches(config, train, plan, 0, 1)
        states = []
        for _ in range(2):
            model = build_model(
                config.model, train.num_known, train.num_novel, 0
            ).train()
            model = model.to(device, memory_format=torch.channels_last)
            states.append(new_state(model, model, config.discover, device, False))
        phase = Phase(
            DISCOVER, config.discover, 10**6, options.batch, None, discovery_step
        )
        pace = Pace(states[1], batches)
        writers = (
            Loggers(config, storage),
            Journal(storage, DISCOVER, 0),
        )
        with (
            writers[0] as loggers,
            writers[1] as journal,
            closing(pace),
        ):

            def plain() -> None:
                for _ in range(options.steps):
                    discovery_step(states[0], batches(states[0].step), config, 0.01)

            def watched() -> None:
                pace.restart()
                for _ in range(options.steps):
                    pace.begin()
                    discovery_step(states[1], batches(states[1].step), config, 0.01)
                    if states[1].step % EVERY == 0:
                        metrics = _collect_metrics_(phase, states[1], 0.01, pace)
                        journal.write(metrics)
                        loggers(metrics)

            seconds = take_turns(
                {"plain": plain, "watched": watched}, options.repeats, options.device
            )
    found = medians(seconds)
    ratios = np.divide(seconds["watched"], seconds["plain"])
    again = np.median(
        np.random.default_rng(0).choice(ratios, (2_000, len(ratios))), axis=1
    )
    return {
        "question": "what do the loggers and the counts of uno.pace cost a step?",
        "command": "python -m benchmarks.loggers " + " ".join(sys.argv[1:]),
        "loggers": names,
        "ms": {
            name: round(1000 * value / options.steps, 3)
            for name, value in found.items()
        },
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [
            round(float(end), 4) for end in np.quantile(again, (0.025, 0.975))
        ],
        "spread": spread(seconds),
        **environment(options.device),
    }


if __name__ == "__main__":
    main()
