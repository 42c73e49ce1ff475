"""An S3 server (moto) on this machine, in a process of its own, for tests.

The server notes every request before it answers, and can wait before each answer.
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LATENCY_MS = 20.0
BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def serve(host: str, port: int, latency_ms: float, log: str) -> None:
    """Serve S3 until the process ends.

    Every request is appended to the file ``log`` as one line, its method and its path,
    and answered after ``latency_ms``.
    """
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as S3 keeps them

        def log(self, *args: Any) -> None:
            """Nothing on the console."""

    s3 = DomainDispatcherApplication(create_backend_app)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        with open(log, "a", encoding="utf-8") as notes:
            notes.write(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}\n")
        time.sleep(latency_ms / 1e3)
        return s3(environ, start_response)

    server = make_server(host, port, answer, threaded=True, request_handler=Handler)
    server.serve_forever()


@contextmanager
def store(
    latency_ms: float = LATENCY_MS, host: str = "127.0.0.1"
) -> Iterator[tuple[dict[str, str], Path]]:
    """Start an empty S3 server, and end it with the context.

    Yields:
        The environment variables that lead clients to it, and the file to which it
        appends its requests.
    """
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests"
        words = [host, str(port), str(latency_ms), str(log)]
        process = subprocess.Popen([sys.executable, __file__, *words])
        try:
            while not _answers(host, port):
                if process.poll() is not None:
                    raise SystemExit("no S3 server: pip install -e .[dev]")
                time.sleep(0.05)
            url = f"http://{host}:{port}"
            yield (
                {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": url, "AWS_ENDPOINT_URL": url},
                log,
            )
        finally:
            process.terminate()
            process.wait()


def _answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def make_bucket() -> None:
    """Create the bucket, as the client that the environment describes."""
    import pyarrow.fs

    files, _ = pyarrow.fs.FileSystem.from_uri(
        f"s3://{BUCKET}/?allow_bucket_creation=true"
    )
    files.create_dir(BUCKET)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
