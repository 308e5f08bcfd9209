"""A Slurm cluster of one machine: Slurm's own daemons, with as many nodes as a test asks for."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.train.job import environment, is_running, wait_until

MISSING = [name for name in ("slurmctld", "slurmd", "sbatch", "srun", "scontrol") if shutil.which(name) is None]

#: Jobs of the partition ``urgent`` preempt those of ``main``.
_PARTITIONS = """
PartitionName=main Nodes=ALL Default=YES OverSubscribe=NO MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL OverSubscribe=NO MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""

#: No munge and no groups of processes: any user can start it, in a container too. A requeued job waits for 5 s, which
#: is the least that Slurm takes for ``cred_expire`` (usual: 120 s), and a node is given up after 10 s (300 s).
_CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MailProg=/bin/true
"""


class SlurmCluster:
    """Slurm's daemons, from entering to leaving.

    Args:
        folder: Where their files go.
        num_nodes: Nodes, all on this machine, with as many processors as there are tasks for.
        cpus: Processors that each node is said to have.
    """

    def __init__(self, folder: Path, num_nodes: int = 1, cpus: int = 2) -> None:
        self.folder, self.num_nodes, self.cpus = folder, num_nodes, cpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        (self.folder / "state").mkdir(parents=True)
        ports = _free_ports(self.num_nodes + 1)
        host = socket.gethostname()
        lines = [_CONFIGURATION.format(host=host, ports=ports, user=getpass.getuser(), folder=self.folder)]
        lines += [
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} State=UNKNOWN\n"
            for number, port in enumerate(ports[1:], 1)
        ]
        lines.append(_PARTITIONS)
        (self.folder / "slurm.conf").write_text("".join(lines))
        self._start("slurmctld", "-D")
        for number in range(1, self.num_nodes + 1):
            self.start_node(f"n{number}")
        is_up = wait_until(lambda: self.ask("sinfo", "-h", "-o", "%D %T") == f"{self.num_nodes} idle", 30)
        assert is_up, self.logs()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ask("scancel", "--user", getpass.getuser())
        wait_until(lambda: not self.ask("squeue", "-h"), 60)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            daemon.wait(30)

    @property
    def environ(self) -> dict[str, str]:
        """Of commands: this cluster, and the ``shardwise`` beside this Python."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return environment() | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MASTER_ADDR": socket.gethostname(),  # the nodes' names are this cluster's alone
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self._start(f"slurmd-{name}", "-D", "-N", name)

    def lose_node(self, name: str) -> None:
        """Kill a node's daemon and all that it has started, as if the machine were gone."""
        daemon = self._daemons[f"slurmd-{name}"]
        mark = f"SLURMD_NODENAME={name}\0".encode()
        steps = [pid for pid in _pids() if mark in _read(pid, "environ")]
        parents = {int(_read(pid, "stat").rpartition(b")")[2].split()[1]) for pid in steps}
        daemon.kill()
        daemon.wait(10)
        for pid in {*steps, *(pid for pid in parents if b"slurmstepd" in _read(pid, "cmdline"))}:
            os.kill(pid, 9)

    def ask(self, *words: str) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=60, check=False)
        return (done.stdout + done.stderr).strip()

    def submit(self, script: Path, *words: str, **variables: str) -> str:
        """Submit a job from a folder that is not its own; its number."""
        done = subprocess.run(
            ["sbatch", "--parsable", str(script), *words],
            env=self.environ | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by name of the field."""
        words = self.ask("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ends(self, job: str, limit_s: float = 300) -> dict[str, str]:
        """Wait for the end of a job; what Slurm says of it then."""
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
        wait_until(lambda: self.state(job).get("JobState") in ends, limit_s)
        return self.state(job)

    def logs(self) -> str:
        """The last lines of the daemons."""
        return "\n".join(f"{path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            program = shutil.which(name.partition("-")[0])
            assert program is not None
            environ = {key: value for key, value in self.environ.items() if not key.startswith("SHARDWISE")}
            self._daemons[name] = subprocess.Popen(
                [program, *words], env=environ, stdout=log, stderr=log, start_new_session=True
            )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_running(int(path.name))]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
