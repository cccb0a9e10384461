"""A real SLURM of two nodes on this machine: `sbatch run_grpo.sh` runs to its end, and `scancel` stops it cleanly."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "sinfo")
TOY = ["run_grpo.sh", "--config", "apps/grpo/toy.yaml", "--eval.samples", "0"]
CONFIG = """
ClusterName=forge
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=60
SchedulerParameters=bf_interval=1,sched_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def programs() -> None:
    """Finds SLURM, or installs it from Debian's packages where this may be done; skips where it may not."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to start slurmd")
    if all(map(shutil.which, PROGRAMS)):
        return
    if not shutil.which("apt-get"):
        pytest.skip("SLURM is not installed, and there is no apt-get to install slurm-wlm and munge with")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "slurm-wlm", "munge"]):
        try:
            subprocess.run(["apt-get", "-qq", *command], env=quiet, capture_output=True, timeout=120, check=True)
        except subprocess.SubprocessError as error:
            said = (error.stderr or b"").decode(errors="replace")[-200:]
            pytest.skip(f"SLURM is not installed, and apt-get {command[0]} failed: {error} {said}")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Cluster:
    """The commands of a SLURM user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable}

    def ask(self, *command: str, timeout: float = 30) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, name: str, *arguments: str) -> tuple[str, Path]:
        """The number of a job on both nodes, and its log."""
        log = self.folder / f"{name}.log"
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", *TOY, *arguments]
        return self.ask(*command), log

    def wait(self, job: str, log: Path, *, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.ask("squeue", "--noheader", "--states=all", "--format=%T", "--job", job) not in ENDED:
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "the job did not start"
            time.sleep(0.3)


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """munged, slurmctld and two slurmd, with everything they write in a folder of this test."""
    programs()
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, ports=free_ports(3)))
    made = Cluster(folder)
    munge = folder / "munge"
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket",
         f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]  # fmt: skip
    with contextlib.ExitStack() as running:
        for number, command in enumerate(daemons):
            log = running.enter_context((folder / f"daemon-{number}.log").open("w"))
            running.callback(end, subprocess.Popen(command, env=made.env, stdout=log, stderr=log))
            time.sleep(0.5)
        deadline = time.monotonic() + 20
        while "2 idle" not in sinfo(made):
            if time.monotonic() > deadline:
                said = "\n".join((folder / f"daemon-{n}.log").read_text()[-500:] for n in range(len(daemons)))
                pytest.skip(f"SLURM does not start on this machine:\n{said}")
            time.sleep(0.3)
        yield made


def sinfo(cluster: Cluster) -> str:
    command = ["sinfo", "--noheader", "--format=%D %T"]
    return subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=30).stdout


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def processes_of(folder: Path) -> list[str]:
    """Commands of what a run left behind: its controller, its workers, its actors."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and str(folder) in process.environ().get("SLURM_CONF", ""):
                found.append(" ".join(process.cmdline()))
    return [command for command in found if "forge" in command or "apps." in command]


def test_a_job_on_two_nodes_runs_to_its_end_and_its_log_shows_the_steps(cluster, tmp_path):
    folder = tmp_path / "run"
    job, log = cluster.submit("whole", "--training.steps", "3", "--output_dir", str(folder))
    cluster.wait(job, log, timeout=150)
    text = log.read_text()
    assert "ExitCode=0:0" in cluster.ask("scontrol", "show", "job", job), text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    steps = [m for m in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in m]
    assert len(steps) == 3
    hosts = json.loads((folder / "environment.json").read_text())
    assert hosts["versions"]["torch"]
    assert (folder / "checkpoints" / "step-3" / "hf" / "model.safetensors").exists()
    assert processes_of(cluster.folder) == []


def test_scancel_leaves_a_checkpoint_and_no_process(cluster, tmp_path):
    folder = tmp_path / "run"
    job, log = cluster.submit("cancelled", "--training.steps", "100000", "--output_dir", str(folder))
    deadline = time.monotonic() + 120
    while not (log.exists() and "step " in log.read_text()):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "the job did not start"
        time.sleep(0.3)
    cluster.ask("scancel", job)
    cluster.wait(job, log, timeout=50)
    text = log.read_text()
    assert "ExitCode=143:0" in cluster.ask("scontrol", "show", "job", job), text
    assert "goes on from here" in text
    assert "Traceback" not in text
    (checkpoint,) = [p for p in (folder / "checkpoints").iterdir() if p.name.startswith("step-")]
    assert (checkpoint / "hf" / "model.safetensors").exists()
    deadline = time.monotonic() + 10
    while (left := processes_of(cluster.folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
