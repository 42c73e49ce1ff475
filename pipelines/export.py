"""``uno export RUN --format encoder|pt2|onnx``: the model as a file for other tools."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipelines import cli
from pipelines.arguments import Arguments


def main(argv: Sequence[str]) -> int:
    """Write the file and say what it is."""
    parser = Arguments("uno export", "Write the model of a run in a format that other tools load, checked.")
    parser.add_argument("run", metavar="RUN", help="run directory, or a copy of its model/ folder")
    parser.add_argument(
        "--format",
        required=True,
        choices=("encoder", "pt2", "onnx"),
        help="encoder: safetensors under torchvision's keys; pt2: torch.export, uint8 images -> "
        "probabilities; onnx: the same for ONNX runtimes",
    )
    parser.add_argument("--output", metavar="FILE", help="default: RUN/model/ and the format's usual name")
    options = parser.parse_args(argv)
    from pipelines.console import say
    from uno.data.files import Storage
    from uno.results.export import FORMATS, can_check_onnx, export
    from uno.results.infer import load_classifier, model_folder

    storage = Storage(options.run)
    model = load_classifier(storage)
    data = export(model, options.format)
    folder, name = storage, model_folder(storage) + FORMATS[options.format]
    if options.output:
        parent, _, name = os.path.expanduser(options.output).rpartition("/")
        folder = Storage(parent or ("/" if options.output.startswith("/") else "."))
    folder.write(name, data)
    side, checked = model.size, "checked against the model"
    if options.format == "onnx" and not can_check_onnx():
        checked = "NOT checked: onnxruntime is not installed"
    takes = "" if options.format == "encoder" else (
        f"; images uint8 (B, 3, {side}, {side}) -> probabilities (B, {len(model.classes)})"
    )  # fmt: skip
    say(f"{folder.path(name)}: {len(data) / 1e6:.1f} MB, {checked}{takes}")
    return 0


if __name__ == "__main__":
    cli.run(main)
