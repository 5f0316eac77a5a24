"""What a run opens to others: sockets on loopback alone, and ports that are told when taken."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bmburst.errors import UserError
from bmburst.host.stores import address_of, listen, owner_of, tcp_sockets
from tests.distributed.ports import held_port
from tests.distributed.started import Python, run_python
from tests.launch.launcher import children, ended, lines_of, start
from tests.refusals import says

__all__ = ["start"]  # the fixture

# BMTrain's communicators and a process group of torch's: every socket that ranks open.
MEETING = """
    import os, time
    import bmburst
    bmburst.start()
    import bmtrain as bmt, torch, torch.distributed as dist
    bmt.sum_loss(torch.ones(1))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print(os.getpid(), flush=True)
    time.sleep(600)
    """


def process_tree(root):
    """Return a process and all that it started."""
    found = [root]
    for pid in found:
        found += children(pid)
    return found


def listening_ports(root):
    """Return, for each process of a tree, the TCP ports that it listens at."""
    listening = {f"socket:[{inode}]": port for port, inode, listens in tcp_sockets() if listens}
    found = {}
    for pid in process_tree(root):
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                port = listening.get(os.readlink(fd))
            except OSError:
                continue
            if port:
                found.setdefault(pid, set()).add(port)
    return found


def other_addresses():
    """Return addresses of this machine that are not 127.0.0.1: a socket at every interface answers at each."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return ["127.0.0.2", probe.getsockname()[0]]
        except OSError:  # a machine with loopback alone
            return ["127.0.0.2"]


def answers(address, port):
    try:
        socket.create_connection((address, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def assert_refused_from_outside(ports):
    reached = [(address, port) for port in sorted(ports) for address in other_addresses() if answers(address, port)]
    assert not reached, f"answered at {reached}"


def test_this_way_of_connecting_finds_an_open_door():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert port in listening_ports(os.getpid())[os.getpid()]
        with pytest.raises(AssertionError, match="answered"):
            assert_refused_from_outside({port})


def test_a_run_on_one_node_listens_on_loopback_alone(start):
    process = start(MEETING, forked=True)
    ranks = {int(line) for line in lines_of(process, 2)}
    found = listening_ports(process.pid)
    assert process.pid in found and ranks <= set(found), found  # the store; gloo in every rank
    assert_refused_from_outside(set().union(*found.values()))


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_no_launcher_of_ours_started_listen_on_loopback_too(size, tmp_path):
    """As those of mpirun or srun are."""
    script = tmp_path / "script.py"
    script.write_text("\n".join(line[4:] for line in MEETING.splitlines()))
    launched = ("RANK", "WORLD", "LOCAL", "MASTER", "TORCHELASTIC", "GLOO", "NCCL", "SLURM", "BMBURST")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with held_port() as port:
        if size > 1:
            environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(port)}
        ranks = [
            Python([str(script)], cwd=tmp_path, env=environ | {"RANK": str(rank), "WORLD_SIZE": str(size)})
            for rank in range(size)
        ]
        try:
            for process in ranks:
                assert int(process.stdout.readline()) == process.pid
            for process in ranks:
                assert_refused_from_outside(listening_ports(process.pid)[process.pid])
        finally:
            for process in ranks:
                process.close()


def test_a_taken_master_port_is_told_by_start_too(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        environ = os.environ | {"MASTER_PORT": str(port), "MASTER_ADDR": "localhost", "CUDA_VISIBLE_DEVICES": ""}
        done = run_python("-c", "import bmburst; bmburst.start()", cwd=tmp_path, env=environ)
    assert "UserError: " in done.stderr and f"port {port} " in done.stderr and f"process {os.getpid()} (" in done.stderr


def test_a_name_of_the_first_node_that_another_does_not_know_is_one_message(tmp_path):
    """torchrun gives the host name of the first node to the ranks of all; torch tries it for half an hour."""
    environ = os.environ | {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = run_python("-c", "import bmburst; bmburst.start()", cwd=tmp_path, env=environ, timeout=60)
    message = done.stderr.rpartition("UserError: ")[2]
    says(message, "MASTER_ADDR is 'no-such-host.invalid' | cannot resolve | fix: torchrun --local-addr")


def test_a_process_that_one_of_a_single_rank_starts_is_a_job_of_its_own(tmp_path):
    launched = ("RANK", "WORLD", "LOCAL", "MASTER", "BMBURST")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    text = "import json, os, time, bmburst; bmburst.start(); print(json.dumps(dict(os.environ)), flush=True)"
    rank = Python(["-c", text + "; time.sleep(600)"], cwd=tmp_path, env=environ | {"CUDA_VISIBLE_DEVICES": ""})
    try:
        inherited = json.loads(rank.stdout.readline())
        child = "import bmburst; print(bmburst.start().world_size)"
        done = run_python("-c", child, cwd=tmp_path, env=inherited)
    finally:
        rank.close()
    assert done.stdout == "1\n", done.stderr


def test_the_owner_of_a_port_that_nobody_has_is_unknown():
    with held_port() as port:
        assert "another user" in owner_of(port)


def test_node_0_is_reached_at_its_own_address():
    assert address_of("127.0.0.1") == "127.0.0.1" and address_of("localhost") == "127.0.0.1"
    known = {"debian": ["127.0.1.1"], "both": ["127.0.1.1", "192.0.2.9"]}

    def resolve(host, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[host]]

    network = SimpleNamespace(getaddrinfo=resolve, socket=socket.socket)
    assert address_of("both", network) == "192.0.2.9"
    assert address_of("debian", network) == other_addresses()[-1] or len(other_addresses()) == 1


def test_an_address_of_another_host_is_refused():
    with pytest.raises(UserError, match=r"192\.0\.2\.9"):
        listen("192.0.2.9", 0)
    with pytest.raises(UserError, match="65536"):
        listen("127.0.0.1", 65536)


def test_a_loopback_that_is_down_is_one_message(tmp_path):
    """As in a new network namespace, where torch's store tries for 15 minutes and no signal ends it."""
    apart = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    (tmp_path / "x.py").write_text("import bmburst; bmburst.start()")
    launch = [*apart, sys.executable, "-m", "bmburst", "launch", "--nproc", "2", "--", "x.py"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    says(done.stderr, "cannot reach its own address 127.0.0.1 | fix: | lo up")


def test_few_open_files_are_one_message(tmp_path):
    for command in ("train", "launch --nproc 2 -- x.py", "doctor"):
        shell = f"ulimit -n 32; exec {sys.executable} -m bmburst {command}"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and "ulimit -n" in done.stderr and "32" in done.stderr
        assert len(done.stderr.splitlines()) <= 3, done.stderr


@pytest.mark.parametrize("seed", ["x", -1, 2**32, 1.5, True, None])
def test_a_seed_that_is_none_is_refused(seed):
    import bmburst

    with pytest.raises(UserError, match="seed"):
        bmburst.start(seed=seed)


TRAINING = """
    import os, signal, sys, time
    import bmburst
    bmburst.start()
    import bmtrain as bmt, torch
    weight = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.1)
    def step():
        bmt.sum_loss(weight.detach())
        sgd.step()
    weight.grad = torch.ones(1)
    for _ in range(3): step()
    print(os.getpid(), flush=True)
    if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        step()
        time.sleep(0.01)
    """


def test_a_stopped_rank_is_named_and_not_who_waits_for_it(start):
    process = start(TRAINING, "--hang-timeout", "2", nproc=2, forked=True)
    status, _, err = ended(process)
    lines = [line for line in err.splitlines() if "host runtime" not in line]
    assert status == 1
    assert len(lines) == 3, err
    says(lines[0], "bmburst: rank 1", socket.gethostname(), "stopped")
    says(lines[1], "rank 0", "script.py", "optimizer steps")


@pytest.mark.long
def test_a_stopped_rank_that_nobody_waits_for_ends_the_run(start):
    """The other rank has ended in order, so no timer of a rank that waits can fire."""
    text = """
        import os, signal
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        """
    status, _, err = ended(start(text, "--hang-timeout", "1"))
    assert status == 1
    says(err, "rank 1", socket.gethostname(), "stopped", "1 s", "--hang-timeout", lines=2)


@pytest.mark.long
def test_who_stands_elsewhere_while_others_stand_in_a_collective_is_named(start):
    text = TRAINING.replace("os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(600)")
    status, _, err = ended(start(text, "--hang-timeout", "2", forked=True))
    lines = [line for line in err.splitlines() if "host runtime" not in line]
    assert status == 1
    says(lines[0], "bmburst: rank 1", socket.gethostname(), "no progress")
    assert any(line.startswith("rank 0 ") for line in lines[1:]), err


def test_a_slow_start_is_no_step_without_progress(start):
    text = """
        import time
        from bmburst.launch.watchdog import beat
        time.sleep(2)
        beat()
        """
    assert ended(start(text, "--hang-timeout", "1")) == (0, "", "")


def test_a_start_that_never_ends_has_a_limit_of_its_own(start):
    status, _, err = ended(start("import time; time.sleep(600)", "--hang-timeout", "600", "--start-timeout", "2"))
    assert status == 1
    says(err, "first step", "2 s", "--start-timeout", lines=9)
