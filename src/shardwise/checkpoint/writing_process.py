"""The program of the process that writes checkpoints during training, one for each rank.

The process receives this rank's file as memory (``background.Image``) and writes it into the save's temporary folder.
Ranks other than 0 then leave a report there; rank 0's process waits for all reports and publishes the checkpoint, or
removes the folder. So saving needs no collective, and shares no interpreter with training. The process ends when the
process that started it ends.

Only rank 0's publishing and copying import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import xxhash

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.outcome import name_space, problem_of, report_name
from shardwise.checkpoint.storage import local_file
from shardwise.launch import inject
from shardwise.launch.worker import die_with_parent

_LENGTH = struct.Struct("<Q")
#: Bytes that are hashed and written at a time.
_CHUNK_BYTES = 8 * 2**20
#: If files can bypass the system's cache: alignment of addresses, offsets and lengths.
_BLOCK = 4096
#: Seconds between rank 0's checks for reports, increasing from the first to the second value.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.5
#: Lower priority than training.
_NICENESS = 15


def send(channel: socket.socket, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
    """Send a message with descriptors of open files."""
    raw = json.dumps(message).encode()
    socket.send_fds(channel, [_LENGTH.pack(len(raw))], files)
    channel.sendall(raw)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors; ``None`` if the other side is gone."""
    head, files, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    if len(head) < _LENGTH.size:
        return None
    raw = bytearray(_LENGTH.unpack(head)[0])
    view = memoryview(raw)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return json.loads(raw), list(files)


def write_image(image: int, num_bytes: int, folder: int, name: str, step: int | None) -> str:
    """Write the first ``num_bytes`` bytes of a memory file to the new file ``name``, and sync it to the disk.

    The system's cache is bypassed if the file system allows it, which takes no processor time from training.

    Returns:
        The hash of the content.

    Raises:
        OSError: Writing failed.
    """
    digest = xxhash.xxh3_128()
    with mmap.mmap(image, num_bytes, prot=mmap.PROT_READ) as content, memoryview(content) as view:
        file, is_direct = _create(folder, name)
        try:
            begin = 0
            while begin < num_bytes:
                end = min(begin + _CHUNK_BYTES, num_bytes)
                if is_direct and (end - begin) % _BLOCK:
                    whole = begin + (end - begin) // _BLOCK * _BLOCK
                    if whole == begin:
                        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
                        is_direct = False
                    else:
                        end = whole
                part = view[begin:end]
                digest.update(part)
                folders.write_all(file, part)
                part.release()
                begin = end
                inject.at("mid_shard_write", step)
            os.fsync(file)
            inject.at("after_shard_fsync", step)
        finally:
            os.close(file)
    return digest.hexdigest()


def _create(folder: int, name: str) -> tuple[int, bool]:
    """Create a file; return its descriptor and whether it bypasses the system's cache."""
    file = folders.create(folder, name)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except (OSError, AttributeError):  # not supported by the file system or the operating system
        return file, False
    return file, True


def run(job: dict[str, Any], image: int | None) -> dict[str, Any]:
    """Write this rank's file, and publish on rank 0; or copy a checkpoint. Return the outcome."""
    if "upload" in job:
        from shardwise.checkpoint.mirror import upload

        return upload(job)
    report = _write(job, image)
    if job["rank"]:
        return _leave(report, job)
    from shardwise.checkpoint.publish import publish

    reports = [report, *(_wait_for_report(job, rank) for rank in range(1, job["world_size"]))]
    return publish(job, reports)


def _write(job: dict[str, Any], image: int | None) -> dict[str, Any]:
    if image is None:
        return job["report"]
    try:
        with folders.open_folder(job["temporary"], follow=False) as folder:
            name = job["own"]["name"]
            try:
                digest = write_image(image, job["own"]["bytes"], folder, name, job["step"])
                if job["keep"] is not None:
                    _read_again(folder, name, digest)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)  # so that the report fits on a full disk
                error.filename = f"{job['temporary']}/{name}"
                name_space(error, job["temporary"], job["own"]["bytes"])
                raise
    except Exception as error:  # noqa: BLE001 - rank 0 must be notified of any error
        return problem_of(error)
    return {**job["report"], "own": {**job["own"], "hash": digest}}


def _read_again(folder: int, name: str, digest: str) -> None:
    """Compare a file with its hash, before older checkpoints are removed.

    Raises:
        RefusedError: The content differs from what was written.
    """
    with folders.open_for_reading(folder, name) as (file, _):
        found = local_file(file).hash()
    if found != digest:
        raise folders.RefusedError(f"{name} reads back with the hash {found}, was written with {digest}")


def _leave(report: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    name = report_name(job["rank"])
    try:
        with folders.open_folder(job["temporary"], follow=False) as folder:
            folders.write_file(folder, f"{name}.part", json.dumps(report).encode())
            os.rename(f"{name}.part", name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        report = {**problem_of(error), **report}
    return report if "problem" in report else {}


def _wait_for_report(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Wait for the report of another rank's process.

    There is no time limit: the other process finishes, or this process is killed.
    """
    path = Path(job["temporary"]) / report_name(rank)
    pause_s = _FIRST_LOOK_S
    while True:
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            if not path.parent.is_dir():
                return {"problem": f"No such file or directory: {path.parent}", "is_storage": True}
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)


def main() -> None:
    """Serve the process that started this one, until that process ends."""
    die_with_parent(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the training process handles signals, and waits for running saves
    os.nice(_NICENESS)
    channel = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ConnectionError):  # killed during a message
        while (received := receive(channel)) is not None:
            job, files = received
            try:
                outcome = run(job, files[0] if files else None)
            except Exception as error:  # noqa: BLE001 - sent to the process that waits for it
                outcome = problem_of(error)
            for file in files:
                os.close(file)
            send(channel, outcome)


if __name__ == "__main__":
    main()
