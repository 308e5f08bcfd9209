"""An S3 server on the loopback (moto's), for checkpoints on an object store."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from unittest import mock

import pytest

from shardwise.checkpoint import storage

#: Values that must be found nowhere.
SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAFORTESTSONLY", "AWS_SECRET_ACCESS_KEY": "never-to-be-seen-in-any-file"}
NEEDS = "needs moto, flask, flask-cors and s3fs (part of shardwise[dev])"


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Serve the bucket ``bucket``, which all servers of a process share. The environment, which is yielded, names it.

    Each server has a port of its own, so the file systems of this process that remember another server's are dropped.
    Skips where a package is missing.
    """
    for name in ("moto", "flask_cors", "s3fs"):
        pytest.importorskip(name, reason=NEEDS)
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    env = {**SECRETS, "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        with mock.patch.dict(os.environ, env):
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()
            storage._objects.cache_clear()
            s3fs.S3FileSystem(skip_instance_cache=True).makedirs("bucket", exist_ok=True)
            yield env
    finally:
        server.stop()
