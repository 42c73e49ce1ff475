"""An S3 server (moto) on this machine, in a process of its own, for tests.

The server notes every request before it answers, and can wait before each answer.
"""

import json
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


def serve(port: int, latency_ms: float, log: str, host: str = "127.0.0.1") -> None:
    """Serve S3 until the process ends.

    Every request is answered after ``latency_ms``, and appended to the file ``log`` as
    one line of JSON: time, method, path, query, bytes of the answer.
    """
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as S3 keeps them

        def log(self, *args: Any) -> None:
            """Nothing on the console."""

    s3 = DomainDispatcherApplication(create_backend_app)
    with open(log, "a", buffering=1, encoding="utf-8") as notes:

        def application(environ: dict[str, Any], start_response: Any) -> Any:
            asked = (
                environ["REQUEST_METHOD"],
                environ["PATH_INFO"],
                environ.get("QUERY_STRING", ""),
            )
            moment = time.time()
            time.sleep(latency_ms / 1e3)

            def answer(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
                size = next(
                    (
                        int(value)
                        for name, value in headers
                        if name.lower() == "content-length"
                    ),
                    0,
                )
                notes.write(json.dumps([moment, *asked, size]) + "\n")
                return start_response(status, headers, *more)

            return s3(environ, answer)

        make_server(
            host, port, application, threaded=True, request_handler=Handler
        ).serve_forever()


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
        words = [str(port), str(latency_ms), str(log), host]
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


def requests_of(log: Path) -> list[tuple[float, str, str]]:
    """Return (time, method, path) of every request; a listing's path ends with its
    prefix.
    """
    found = []
    for line in log.read_text().splitlines():
        moment, method, path, query, _ = json.loads(line)
        prefix = query.partition("prefix=")[2].partition("&")[0].replace("%2F", "/")
        found.append((moment, method, f"{path}/{prefix}" if prefix else path))
    return found


def bytes_read(log: Path) -> int:
    """Return the bytes of all answers that hold an object or a part of one."""
    lines = map(json.loads, log.read_text().splitlines())
    return sum(
        size for _, method, _, query, size in lines if method == "GET" and not query
    )


def make_bucket() -> None:
    """Create the bucket, as the client that the environment describes."""
    import pyarrow.fs

    files, _ = pyarrow.fs.FileSystem.from_uri(
        f"s3://{BUCKET}/?allow_bucket_creation=true"
    )
    files.create_dir(BUCKET)


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4])
