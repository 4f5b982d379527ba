"""Ranks with CPU shares of their own, on one host or on two with a slow link between them.

Each rank joins a cgroup with a CPU quota, so that a rank that waits lends its time to nobody, and
may stay on one core. The groups have a high weight: what else runs on the machine takes little of
the quotas. Two hosts are two network namespaces joined by a pair of virtual interfaces, each with a
token bucket. Needs root on Linux.

A script that launches ranks is started again with `--worker GROUPS WORDS...`, once a rank, and
calls `join` first.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PERIOD_US = 2_500
WEIGHT = 64
"""Of a rank's group, in units of an ordinary process."""

ADDRESS, PORT = "10.97.0.", "29517"
MARK = "elapsed time per iteration (ms): "


class CpuShares:
    """A cgroup for each rank, with a quota of its own.

    Args:
        num_ranks: ranks.
        share: of a core, each rank.
    """

    def __init__(self, num_ranks: int, share: float) -> None:
        is_v1 = Path("/sys/fs/cgroup/cpu").is_dir()
        self.parent = Path("/sys/fs/cgroup/cpu" if is_v1 else "/sys/fs/cgroup")
        self.folders = [self.parent / f"nsp-{os.getpid()}-{rank}" for rank in range(num_ranks)]
        quota = int(share * PERIOD_US)
        for folder in self.folders:
            folder.mkdir()
            if is_v1:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
                (folder / "cpu.shares").write_text(str(1024 * WEIGHT))
            else:
                (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
                (folder / "cpu.weight").write_text(str(100 * WEIGHT))

    def remove(self) -> None:
        """Removes the groups, once their processes are gone."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True)
class Cluster:
    """Where ranks run.

    Attributes:
        shares: a group for each rank.
        hosts: names of the network namespaces; none: this host.
    """

    shares: CpuShares
    hosts: tuple[str, ...] = ()


@contextlib.contextmanager
def cluster(num_ranks: int, share: float, rate: str | None) -> Iterator[Cluster]:
    """Ranks with a share of a core each, on two hosts if there is a rate for the link between."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise SystemExit("CPU shares and network namespaces need root and the tool ip")
    shares = CpuShares(num_ranks, share)
    try:
        with two_hosts(rate) if rate else contextlib.nullcontext(()) as hosts:
            yield Cluster(shares, hosts)
    finally:
        shares.remove()


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link of this rate, as `tc` writes it, between them."""
    hosts = f"nsp{os.getpid()}a", f"nsp{os.getpid()}b"
    for host in hosts:
        run("ip", "netns", "add", host)
    try:
        ends = [f"v-{host}" for host in hosts]
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (host, end) in enumerate(zip(hosts, ends, strict=True), 1):
            run("ip", "link", "set", end, "netns", host)
            inside = ("ip", "netns", "exec", host)
            run(*inside, "ip", "addr", "add", f"{ADDRESS}{number}/24", "dev", end)
            run(*inside, "ip", "link", "set", end, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            limit = ("tbf", "rate", rate, "burst", "256kbit", "latency", "50ms")
            run(*inside, "tc", "qdisc", "add", "dev", end, "root", *limit)
        yield hosts
    finally:
        for host in hosts:
            run("ip", "netns", "del", host)


def run(*command: str) -> None:
    """Runs a command; its error ends the benchmark."""
    subprocess.run(command, check=True)


def launch(script: str, where: Cluster, *words: str) -> str:
    """Runs the worker of a script on all ranks and returns what it printed."""
    num_ranks = len(where.shares.folders)
    groups = ":".join(map(str, where.shares.folders))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    worker = [script, "--worker", groups, *words]
    commands = [[*torchrun, "--standalone", "--nproc-per-node", str(num_ranks), *worker]]
    if where.hosts:
        network = ["--nnodes", "2", "--nproc-per-node", str(num_ranks // 2)]
        network += ["--master-addr", f"{ADDRESS}1", "--master-port", PORT]
        commands = []
        for number, host in enumerate(where.hosts):
            # Not `ip netns exec`, which mounts another /sys, without the groups.
            inside = ["nsenter", f"--net=/run/netns/{host}", "env"]
            inside.append(f"GLOO_SOCKET_IFNAME=v-{host}")
            commands.append([*inside, *torchrun, *network, "--node-rank", str(number), *worker])
    with contextlib.ExitStack() as stack:
        # Not pipes: a host with a full one, read after the other host ended, would never let it.
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = [
            subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            for command, output in zip(commands, outputs, strict=True)
        ]
        for process in processes:
            stack.callback(process.terminate)
        codes = [process.wait() for process in processes]
        for output in outputs:
            output.seek(0)
        printed = "".join(output.read() for output in outputs[::-1])
    if any(codes):
        raise SystemExit(f"a run failed:\n{printed[-4000:]}")
    return printed


def join(groups: str, on_one_core: bool = True) -> None:
    """Puts this rank into its group and, unless told not to, on its core, shared by neighbours."""
    folders, rank = groups.split(":"), int(os.environ["RANK"])
    Path(folders[rank], "cgroup.procs").write_text(str(os.getpid()))
    if on_one_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank * len(cores) // len(folders)]})


def profile_worker(words: list[str]) -> int:
    """One rank of `megatron-nsp profile`."""
    from megatron_nsp.cli import main

    return main(["profile", *words])


def measured_ms(printed: str, num_steps: int) -> list[float]:
    """Time of every step, from Megatron's log."""
    times = [float(line.split(MARK)[1].split()[0]) for line in printed.splitlines() if MARK in line]
    if len(times) != num_steps:
        raise SystemExit(f"{len(times)} steps in the log, {num_steps} expected:\n{printed[-3000:]}")
    return times


def add_cluster_flags(parser: argparse.ArgumentParser, share: float, rate: str) -> None:
    """Declares `--share` and `--rate`."""
    parser.add_argument("--share", type=float, default=share, help="of a core, each rank")
    parser.add_argument("--rate", default=rate, help="of the link between the hosts (%(default)s)")
