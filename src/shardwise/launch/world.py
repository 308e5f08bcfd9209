"""Join the world that the environment describes.

:func:`read_world` converts environment variables to a :class:`World`. It is pure, so the variables of every launcher
can be tested as a dictionary. :func:`init_process_group` creates torch.distributed's default group from it.

The sources of a world, in the order in which they are tried:

=============  =======================================================================================================
``launcher``   RANK, WORLD_SIZE, ... and SHARDWISE_RENDEZVOUS_DIR: our own ``launch.elastic``
``torchrun``   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_*
``variables``  RANK and WORLD_SIZE, set by anything else
``slurm``      SLURM_STEP_ID, SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST: tasks of ``srun``
``alone``      none of them: a world of one
=============  =======================================================================================================

On one machine the store, and the sockets that Gloo opens while joining, listen only on 127.0.0.1. So does NCCL if our
launcher started the processes (``launch.elastic`` sets ``NCCL_SOCKET_IFNAME``). On several machines the store listens
on rank 0's own address, never on all interfaces, and the network must be private: whoever can reach the port can write
the keys by which the ranks find each other.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import itertools
import logging
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.launch import watchdog
from shardwise.launch.log_once import log_once
from shardwise.spec.errors import CommError, ConfigError, MeshError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

#: Directory for the rendezvous of our launcher's ranks on one machine, accessible only to this user.
RENDEZVOUS_DIR = "SHARDWISE_RENDEZVOUS_DIR"
#: Number of times that our launcher has restarted this run.
RESTART_COUNT = "SHARDWISE_RESTART_COUNT"

DEFAULT_TIMEOUT_S = 300.0
_LOOPBACK = "127.0.0.1"
#: Selects Gloo's network interface; by default the one to which the machine's host name belongs.
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
#: ioctl for the address of an interface on Linux.
_SIOCGIFADDR = 0x8915
_DEFAULT_PORT = 29500
#: Seconds between rank 0's checks for ranks that have joined a world of torchrun.
_ANSWERS_EVERY_S = 0.02
_logger = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class World:
    """This process among all processes of the run.

    Attributes:
        rank: From 0 to ``size - 1``.
        size: Number of processes.
        local_rank: From 0 to ``local_size - 1`` on this machine; the index of its device.
        local_size: Number of processes on this machine.
        num_nodes: Number of machines.
        master_addr: Address of rank 0.
        master_port: Port of rank 0; 0 if none is needed.
        source: The kind of variables that described the world, from the table at the top of this module.
        restart_count: Number of times that the launcher has restarted the run.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    num_nodes: int = 1
    master_addr: str = _LOOPBACK
    master_port: int = 0
    source: str = "alone"
    restart_count: int = 0

    @property
    def is_single_node(self) -> bool:
        """Whether all processes run on one machine."""
        return self.num_nodes == 1

    @property
    def ranks_per_machine(self) -> int | None:
        """Ranks on each machine; ``None`` if machines have different numbers of ranks."""
        return self.local_size if self.local_size * self.num_nodes == self.size else None


def read_world(environ: Mapping[str, str] | None = None) -> World:
    """Return the world that ``environ`` (by default this process's environment) describes.

    Raises:
        MeshError: Variables contradict each other.
    """
    variables = _Variables(dict(os.environ if environ is None else environ))
    if variables.has("PET_NODE_RANK") and not variables.has("LOCAL_RANK"):
        raise ConfigError(
            "PET_NODE_RANK is set in the environment, as in a pod of Kubeflow, but LOCAL_RANK is not: torchrun has not"
            " started this process.\n"
            "  Let the pod's command be `torchrun -m shardwise ...`: torchrun reads the PET_ variables."
        )
    if variables.has("RANK") or variables.has("WORLD_SIZE"):
        world = _from_rank_variables(variables)
    elif _is_task_of_slurm(variables):
        world = _from_slurm(variables)
    else:
        return World()
    _check(world)
    return world


def ranks_per_machine(size: int) -> int | None:
    """Return the number of the world's ``size`` ranks on each machine; ``None`` if the environment does not say."""
    with contextlib.suppress(ConfigError, MeshError):
        world = read_world()
        if world.size == size:
            return world.ranks_per_machine
    return None


@dataclass(frozen=True)
class _Variables:
    """Environment variables; errors name the variable."""

    environ: dict[str, str] = field(repr=False)

    def has(self, name: str) -> bool:
        return self.environ.get(name, "").strip() != ""

    def text(self, *names: str) -> str | None:
        return next((self.environ[name].strip() for name in names if self.has(name)), None)

    def number(self, *names: str, minimum: int = 0) -> int | None:
        """Return the first of ``names`` that is set, as a number."""
        for name in names:
            if self.has(name):
                text = self.environ[name].strip()
                if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
                    message = f"{name}={text!r} in the environment is not a whole number of at least {minimum}."
                    raise ConfigError(f"{message}\n  Set {name} to a number, or unset it.")
                return int(text)
        return None

    def required(self, *names: str, other: str, minimum: int = 0) -> int:
        number = self.number(*names, minimum=minimum)
        if number is None:
            raise ConfigError(
                f"{other} is set in the environment, but {names[0]} is not.\n"
                f"  Set {names[0]} too, or start with torchrun, which sets all of them; or unset {other}."
            )
        return number


def _from_rank_variables(variables: _Variables) -> World:
    rank = variables.required("RANK", other="WORLD_SIZE")
    size = variables.required("WORLD_SIZE", other="RANK", minimum=1)
    address, port = variables.text("MASTER_ADDR"), _port(variables)
    if variables.has(RENDEZVOUS_DIR):
        source = "launcher"
    elif variables.has("TORCHELASTIC_RUN_ID"):
        source = "torchrun"
    else:
        source = "variables"
    if address is None and size > 1 and source != "launcher":
        raise ConfigError(
            f"WORLD_SIZE={size} in the environment, but MASTER_ADDR is not set: the ranks cannot find each other.\n"
            "  Set MASTER_ADDR and MASTER_PORT to rank 0's machine and a free port, or start with torchrun."
        )
    local_rank, local_size = _local_of_rank_variables(variables, rank, size, address or _LOOPBACK)
    num_nodes = variables.number("GROUP_WORLD_SIZE", minimum=1) or -(-size // local_size)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        num_nodes=num_nodes,
        master_addr=address or _LOOPBACK,
        master_port=port if port is not None else (0 if source == "launcher" or size == 1 else _DEFAULT_PORT),
        source=source,
        restart_count=variables.number(RESTART_COUNT, "TORCHELASTIC_RESTART_COUNT") or 0,
    )


def _local_of_rank_variables(variables: _Variables, rank: int, size: int, address: str) -> tuple[int, int]:
    local_rank = variables.number("LOCAL_RANK")
    local_size = variables.number("LOCAL_WORLD_SIZE", "LOCAL_SIZE", minimum=1)
    if local_rank is not None and local_size is not None:
        return local_rank, local_size
    if _is_loopback(address) or size == 1:  # all ranks are on this machine
        return rank if local_rank is None else local_rank, size if local_size is None else local_size
    if local_rank is None:
        return 0, local_size or 1  # one process for each machine
    raise ConfigError(
        f"LOCAL_RANK={local_rank} is set in the environment, but LOCAL_WORLD_SIZE is not.\n"
        "  Set LOCAL_WORLD_SIZE to the number of processes on this machine, or start with torchrun."
    )


def _is_task_of_slurm(variables: _Variables) -> bool:
    """Return whether ``srun`` has started this process as one of the ranks.

    A batch script also has the variables of a task 0, but no step; a shell of ``srun --pty`` is a step of one task.
    """
    is_in_step = variables.has("SLURM_PROCID") and variables.has("SLURM_STEP_ID")
    is_shell = variables.has("SLURM_PTY_PORT") and variables.text("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") == "1"
    return is_in_step and not is_shell


def _from_slurm(variables: _Variables) -> World:
    rank = variables.required("SLURM_PROCID", other="SLURM_PROCID")
    size = variables.required("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", other="SLURM_PROCID", minimum=1)
    nodes_text = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = expand_nodelist(nodes_text) if nodes_text is not None else []
    num_nodes = variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", minimum=1)
    num_nodes = num_nodes or len(hosts) or 1
    if hosts and len(hosts) != num_nodes:
        raise MeshError(
            f"Slurm says {num_nodes} nodes, but its node list {nodes_text!r} names {len(hosts)}.\n"
            "  Unset the SLURM_ variables, or start the processes with srun."
        )
    address, port = variables.text("MASTER_ADDR"), _port(variables)
    if address is None:
        if num_nodes > 1 and not hosts:
            raise ConfigError(
                f"Slurm says {num_nodes} nodes, but neither SLURM_JOB_NODELIST nor MASTER_ADDR is set.\n"
                "  Set MASTER_ADDR to the host of rank 0."
            )
        address = hosts[0] if num_nodes > 1 else _LOOPBACK
    if port is None:
        port = _port_of_step(variables) if size > 1 else 0
    return World(
        rank=rank,
        size=size,
        local_rank=variables.required("SLURM_LOCALID", other="SLURM_PROCID"),
        local_size=_slurm_local_size(variables, size, num_nodes),
        num_nodes=num_nodes,
        master_addr=address,
        master_port=port,
        source="slurm",
        restart_count=variables.number("SLURM_RESTART_COUNT") or 0,
    )


def _port_of_step(variables: _Variables) -> int:
    """Return a port that jobs and steps on one machine do not share, below the system's ephemeral ports."""
    job, step = variables.number("SLURM_JOB_ID", "SLURM_JOBID") or 0, variables.number("SLURM_STEP_ID") or 0
    return 15000 + (job + 97 * step) % 17000


def _slurm_local_size(variables: _Variables, size: int, num_nodes: int) -> int:
    """Return the tasks on this node, from ``SLURM_TASKS_PER_NODE`` such as ``4(x2),3`` if it is set."""
    name = "SLURM_STEP_TASKS_PER_NODE" if variables.has("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    text = variables.text(name)
    if text is not None:
        counts: list[int] = []
        for item in text.split(","):
            match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item.strip())
            if match is None:
                raise ConfigError(
                    f"{name}={text!r} in the environment is not of the form 4(x2),3.\n"
                    "  Start the processes with srun, which sets it."
                )
            counts += [int(match[1])] * int(match[2] or 1)
        node = variables.number("SLURM_NODEID") or 0
        if node < len(counts) and sum(counts) == size:
            return counts[node]
    per_node = variables.number("SLURM_NTASKS_PER_NODE", minimum=1)
    if per_node is not None and per_node * num_nodes == size:
        return per_node
    if size % num_nodes:
        raise MeshError(
            f"Slurm says {size} tasks on {num_nodes} nodes, but not how many there are on this one.\n"
            "  Start with srun --ntasks-per-node=N."
        )
    return size // num_nodes


def expand_nodelist(text: str) -> list[str]:
    """Expand a Slurm node list: ``"n[01-03,7],gpu-[1-2]-ib"`` gives n01, n02, n03, n7, gpu-1-ib, gpu-2-ib."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\]]", text):
        parts = re.split(r"\[([^\[\]]*)\]", item)
        if any(set(part) & set("[]") for part in parts):
            raise ConfigError(f"node list {text!r} has unbalanced brackets.\n  Expected a form such as node[01-04,7].")
        choices = [_expand_ranges(part, text) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(combination).strip() for combination in itertools.product(*choices)]
    if not hosts:
        raise ConfigError(f"node list {text!r} names no host.\n  Expected a form such as node[01-04,7].")
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    names: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", item)
        first, last = (match[1], match[2] or match[1]) if match else ("0", "0")
        if match is None or int(last) < int(first) or int(last) - int(first) > 1_000_000:
            raise ConfigError(
                f"node list {text!r} has a malformed range {item!r}.\n  Expected a form such as node[01-04,7]."
            )
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def _port(variables: _Variables) -> int | None:
    port = variables.number("MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port} in the environment is not a port.\n  Use a number from 1 to 65535.")
    return port


def _check(world: World) -> None:
    """Refuse inconsistent worlds, before any rank waits for another."""
    if world.rank >= world.size:
        raise MeshError(
            f"rank {world.rank} is not in a world of {world.size} (variables of {world.source}).\n"
            f"  Ranks go from 0 to {world.size - 1}: correct RANK or WORLD_SIZE."
        )
    if world.local_size > world.size:
        raise MeshError(
            f"{world.local_size} processes on this machine are more than the {world.size} of the whole world "
            f"(variables of {world.source}).\n  Correct LOCAL_WORLD_SIZE or WORLD_SIZE."
        )
    if world.local_rank >= world.local_size:
        raise MeshError(
            f"local rank {world.local_rank} is not among the {world.local_size} processes of this machine "
            f"(variables of {world.source}).\n  Correct LOCAL_RANK or LOCAL_WORLD_SIZE."
        )
    if world.num_nodes == 1 and world.local_size != world.size:
        raise MeshError(
            f"one machine with {world.local_size} processes does not make a world of {world.size} "
            f"(variables of {world.source}).\n  Correct LOCAL_WORLD_SIZE or WORLD_SIZE."
        )


# --- joining ----------------------------------------------------------------------------------------------------------

_has_initialized = False
#: Conditions under which the group is kept; see :func:`keep_group_while`.
_keep_conditions: list[Callable[[], bool]] = []
#: Counts this process's stores in files, because a rank may still use the file of the world before.
_num_stores = itertools.count()


def init_process_group(
    world: World, device: torch.device | str = "cpu", *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Create torch.distributed's default group: Gloo for host memory, and NCCL for CUDA if ``device`` is a GPU.

    Does nothing if a default group already exists.

    Args:
        world: The result of :func:`read_world`.
        device: The device on which this rank computes.
        timeout_s: Seconds that a rank waits for its peers, here and in every collective.

    Raises:
        ConfigError: Other machines cannot reach this one by its host name, and no variable selects a network interface.

    Collective:
        All ranks of the world must call.
    """
    global _has_initialized  # noqa: PLW0603 - torch.distributed's default group is a global too; this says whose it is
    import torch
    from torch import distributed

    if distributed.is_initialized():
        return
    _check_host_name(world)
    timeout = dt.timedelta(seconds=timeout_s)
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda:
        watchdog.prepare(timeout_s)
    try:
        with gloo_on_loopback() if world.is_single_node else contextlib.nullcontext():
            # No device_id: with one, torch would connect all ranks over NCCL now, and create every later group by a
            # split of
            # that communicator, in which the whole world must take part, not only the ranks of the group.
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                store=_store(world, timeout),
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
            )
    except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
        if isinstance(error, CommError):
            raise
        raise CommError(
            f"rank {world.rank} of {world.size} could not join the others at {world.master_addr}:{world.master_port} "
            f"({world.source}) within {timeout_s:g} s: {error}\n"
            "  See whether every rank was started, and whether this address and port can be reached from all machines."
        ) from error
    _has_initialized = True


def own_device(world: World) -> torch.device:
    """Return this rank's device and make it the current one: a GPU per rank, or the CPU on a machine without GPUs."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus, index = torch.cuda.device_count(), world.local_rank
    if num_gpus == 1 and world.source == "slurm":
        index = 0  # --gpus-per-task: each task sees only its own GPU
    if index >= num_gpus:
        raise MeshError(
            f"{world.local_size} ranks on this machine need {world.local_size} GPUs, but rank {world.rank} sees"
            f" {num_gpus}.\n  Start as many ranks as GPUs; under Slurm with --gpus-per-node={world.local_size}."
        )
    if num_gpus > world.local_size and world.source == "slurm":
        log_once(
            f"{num_gpus} GPUs are visible, but Slurm has started {world.local_size} task{'s' * (world.local_size > 1)}"
            f" here, so that the others stay idle. Use them with srun --ntasks-per-node={num_gpus}"
            f"{f', or --nproc {num_gpus}' if world.size == 1 else ''}"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def join(world: World, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> torch.device:
    """Select this rank's device and join the default process group, which :func:`shutdown` leaves.

    Returns:
        The device of this rank.

    Raises:
        CommError: As :func:`init_process_group`.

    Collective:
        All ranks of the world must call.
    """
    device = own_device(world)
    init_process_group(world, device, timeout_s=timeout_s)
    return device


@contextlib.contextmanager
def joined_world(world: World, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[torch.device]:
    """Call :func:`join`, and at the end :func:`shutdown` if that created the group. All ranks must enter."""
    from torch import distributed

    existed = distributed.is_initialized()
    device = join(world, timeout_s=timeout_s)
    try:
        yield device
    finally:
        if not existed:
            shutdown()


def keep_group_while(is_needed: Callable[[], bool]) -> None:
    """Make :func:`shutdown` keep the default group while ``is_needed()`` returns true."""
    _keep_conditions.append(is_needed)


def shutdown() -> None:
    """Destroy the default group if :func:`init_process_group` created it. A group made by the user stays.

    If a device waits for a peer that will not come, nothing is destroyed, because torch would wait for the device.
    """
    global _has_initialized  # noqa: PLW0603 - see init_process_group
    if not _has_initialized:
        return
    from torch import distributed

    if distributed.is_initialized() and not any(is_needed() for is_needed in _keep_conditions):
        distributed.destroy_process_group()
    _has_initialized = False


def _store(world: World, timeout: dt.timedelta) -> Store:
    """Return the store through which the ranks find each other. Different attempts of a run share no keys."""
    from torch import distributed

    if world.size == 1:
        return distributed.HashStore()
    directory = os.environ.get(RENDEZVOUS_DIR)
    if directory and world.is_single_node:
        name = f"pg-{world.restart_count}-{next(_num_stores)}"
        store = distributed.FileStore(str(Path(directory) / name), world.size)
        store.set_timeout(timeout)
        return store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = distributed.TCPStore(world.master_addr, world.master_port, world.size, is_master=False, timeout=timeout)
    else:
        store = _tcp_store(world, timeout)
    if world.source == "torchrun":
        return distributed.PrefixStore(f"shardwise/{_agree_on_name(store, world, timeout)}", store)
    return distributed.PrefixStore(f"shardwise/attempt-{world.restart_count}", store)


def _agree_on_name(store: Store, world: World, timeout: dt.timedelta) -> str:
    """Return a name that is common to this world's ranks, and different from that of any earlier world in the store.

    torchrun's agents keep a store over restarts, and each agent counts restarts separately. Therefore every rank asks
    under a new token, and rank 0 answers each token with a random name, until all ranks have acknowledged the name. A
    rank of an earlier world that has asked under the same rank number is answered too, but does not acknowledge.
    """
    place = "shardwise/meeting"
    if world.rank != 0:
        token = secrets.token_hex(8)
        store.set(f"{place}/asks-{world.rank}", token)
        name = store.get(f"{place}/answers-{token}").decode()
        store.set(f"{place}/thanks-{world.rank}-{name}", "")
        return name
    name, end = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    missing, answered = set(range(1, world.size)), set[str]()
    while missing:
        for rank in sorted(missing):
            if store.check([f"{place}/thanks-{rank}-{name}"]):
                missing.discard(rank)
            elif store.check([f"{place}/asks-{rank}"]):
                token = store.get(f"{place}/asks-{rank}").decode()
                if token not in answered:
                    store.set(f"{place}/answers-{token}", name)
                    answered.add(token)
        if time.monotonic() > end:
            raise CommError(
                f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))} of {world.size} did not"
                f" come within {timeout.total_seconds():g} s.\n  See in their logs why they did not start."
            )
        if missing:
            time.sleep(_ANSWERS_EVERY_S)
    return name


def _tcp_store(world: World, timeout: dt.timedelta) -> Store:
    from torch import distributed

    address = _LOOPBACK if world.is_single_node else world.master_addr
    if world.rank != 0:
        return distributed.TCPStore(address, world.master_port, world.size, is_master=False, timeout=timeout)
    if not world.is_single_node:
        _logger.warning(
            "rank 0 listens on %s:%d; the network between the ranks must be private.", address, world.master_port
        )
    listener = _listen(_LOOPBACK if world.is_single_node else _own_address(address), world.master_port)
    return distributed.TCPStore(
        listener.getsockname()[0],
        world.master_port,
        world.size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # closed by the store
        wait_for_workers=False,
    )


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise CommError(
            f"rank 0 cannot listen on {address}:{port}: {error.strerror}.\n"
            "  Set MASTER_PORT to a free port, and MASTER_ADDR to an address of the machine of rank 0."
        ) from error
    return listener


def _check_host_name(world: World) -> None:
    """Refuse one of several machines if its host name resolves to loopback, as in Debian's /etc/hosts.

    Gloo listens on the address of that name, and no other machine would reach it: all ranks would wait for the time
    limit. Under launchers other than Slurm the machine of rank 0 is accepted, because all ranks may be on it.
    """
    if world.is_single_node or os.environ.get(_GLOO_INTERFACE):
        return
    name = socket.gethostname()
    if (world.source != "slurm" and _resolves_to_loopback(world.master_addr)) or not _resolves_to_loopback(name):
        return
    interfaces = ", ".join(each for _, each in socket.if_nameindex() if each != loopback_interface())
    raise ConfigError(
        f"this machine's own name, {name}, leads to loopback here (see /etc/hosts): other machines cannot reach it.\n"
        f"  Set {_GLOO_INTERFACE} (and NCCL_SOCKET_IFNAME) to the network between the machines: {interfaces}."
    )


def _resolves_to_loopback(name: str) -> bool:
    """Return whether a name resolves to loopback, or not at all."""
    try:
        return _is_loopback(_resolve(name))
    except OSError:
        return True


def _resolve(name: str) -> str:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def _own_address(address: str) -> str:
    """Return the numeric address on which rank 0 of several machines listens: the given one, never all interfaces."""
    if _is_loopback(address):  # some launchers give rank 0 "localhost" and the other ranks its name
        address = socket.gethostname()
    try:
        found = _resolve(address)
        interface = os.environ.get(_GLOO_INTERFACE, "").split(",")[0]
        is_right = not _is_loopback(found) or interface in {"", loopback_interface()}
        return found if is_right else address_of(interface)
    except OSError as error:
        raise CommError(
            f"the address {address!r} of rank 0 is not known here: {error}.\n  Set MASTER_ADDR to a name or number "
            "that every machine can resolve."
        ) from error


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine (``netdevice(7)``)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        answer = fcntl.ioctl(udp_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _is_loopback(address: str) -> bool:
    return address in {"localhost", "::1"} or address.startswith("127.")


@contextlib.contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make Gloo listen on loopback while a group is created whose ranks are all on this machine."""
    if _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = loopback_interface()
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface."""
    with contextlib.suppress(OSError):
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in ("lo", "lo0") if name in names), "lo")
    return "lo"
