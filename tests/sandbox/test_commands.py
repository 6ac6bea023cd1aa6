"""Attacks by commands in the sandbox, which may speak TCP with one socket of the caller."""

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.jails import eventually, imprisoned, program, require_isolation, run_python

from gspo_env.sandbox import PORT, CommandEnd, Sandbox, find_missing_for_commands

PYTHON = os.path.realpath(sys.executable)
BOX = Sandbox(cpu_seconds=30, memory_mib=512, processes=16, readable=(PYTHON,))


@pytest.fixture(scope="module", autouse=True)
def isolation():
    """Fails or skips all tests on a machine that cannot isolate commands."""
    require_isolation(find_missing_for_commands())


def inside(code, box=BOX, **variables):
    """The end of Python code that runs as a command."""
    with box.start([PYTHON, "-I", "-S", "-"], stdin=code, variables=variables) as started:
        return started.wait(60.0)


def outside(code):
    return run_python("-I", "-c", code).stdout


def attempts(tries):
    """A program that tries expressions and prints the number of the error of each, 0 for none."""
    return program(
        """
        import os, socket
        for text in tries:
            try:
                eval(text)
                print(0)
            except OSError as error:
                print(error.errno)
        """,
        tries=list(tries),
    )


def errors(tries, box=BOX):
    end = inside(attempts(tries), box)
    assert end.code == 0, end.stderr
    return [int(line) for line in end.stdout.split()]


def test_the_socket_of_the_caller_is_reached_and_answers():
    code = f"""
        import socket
        with socket.create_connection(("127.0.0.1", {PORT})) as line:
            line.sendall(b"hello")
            print(line.recv(5).decode())
    """
    with BOX.start([PYTHON, "-I", "-S", "-"], stdin=textwrap.dedent(code)) as started:
        started.listener.settimeout(30)
        line, _ = started.listener.accept()
        with line:
            assert line.recv(5) == b"hello"
            line.sendall(b"world")
        end = started.wait(30)
    assert end == CommandEnd(code=0, stdout="world\n", stderr="")


def test_no_listener_of_the_machine_is_reached():
    name = f"\0gspo-command-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        port = tcp.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}), 5)"
        abstract = f"socket.socket(socket.AF_UNIX).connect({name!r})"
        assert outside(attempts([connect, abstract])) == "0\n0\n"
        assert errors([connect, abstract]) == [errno.ECONNREFUSED, errno.EPERM]


def test_no_address_outside_has_a_route():
    hosts = ["192.0.2.1", "10.0.0.1", "169.254.169.254", "172.17.0.1"]
    found = errors([f"socket.create_connection(({host!r}, 80), 5)" for host in hosts])
    assert found == [errno.ENETUNREACH] * len(hosts)


def test_only_tcp_sockets_and_pairs_of_streams_can_be_had():
    allowed = ["socket.socket()", "socket.socketpair()"]
    families = ("AF_UNIX", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG")
    refused = [f"socket.socket(socket.{family})" for family in families]
    kinds = [("DGRAM", 0), ("RAW", 1), ("STREAM", 262), ("STREAM", 132), ("SEQPACKET", 0)]
    refused += [f"socket.socket(socket.AF_INET, socket.SOCK_{k}, {p})" for k, p in kinds]
    pair = "socket.socketpair(socket.AF_UNIX, socket.SOCK_"
    refused += [f"{pair}{kind})" for kind in ("DGRAM", "SEQPACKET")]
    assert errors([*allowed, *refused]) == [0, 0] + [errno.EPERM] * len(refused)


def test_options_that_attach_programs_or_load_modules_are_refused():
    allowed = [(1, 2), (1, 9), (6, 1)]
    refused = [(1, 26), (1, 50), (1, 7), (1, 8), (1, 60), (6, 13), (6, 31), (0, 64), (41, 26)]
    tries = [f"socket.socket().setsockopt({level}, {o}, 1)" for level, o in allowed + refused]
    assert errors(tries) == [0] * len(allowed) + [errno.EPERM] * len(refused)


def test_a_connected_pair_reaches_no_socket_in_a_readable_folder(tmp_path):
    tmp_path.chmod(0o755)
    path = tmp_path / "log"
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(path))
        path.chmod(0o777)
        line.listen()
        box = Sandbox(memory_mib=512, readable=(PYTHON, str(tmp_path)))
        tries = [
            f"socket.socketpair()[0].connect({str(path)!r})",
            f"socket.socketpair()[0].sendto(b'x', {str(path)!r})",
            f"[a.close() or b.connect({str(path)!r}) for a, b in [socket.socketpair()]]",
        ]
        assert 0 not in errors(tries, box)
        line.setblocking(False)
        with pytest.raises(BlockingIOError):
            line.accept()


def test_the_port_of_the_caller_cannot_be_taken():
    take = "(s := socket.socket()).{}bind(('127.0.0.1', 8000)) or s.listen()"
    reuse = "setsockopt(1, {}, 1) or s."
    assert 0 not in errors([take.format(""), *(take.format(reuse.format(n)) for n in (2, 15))])


def test_buffers_of_sockets_are_small():
    code = "import socket; print(*(socket.socket().getsockopt(1, option) for option in (7, 8)))"
    assert max(map(int, inside(code).stdout.split())) <= 65536


def test_the_machines_files_processes_and_variables_are_out_of_reach(tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOX_TEST_TOKEN", "opensesame")
    tmp_path.chmod(0o755)
    for name in ("agent.py", "secret"):
        (tmp_path / name).write_text("x")
    (tmp_path / "secret").chmod(0o644)
    box = Sandbox(memory_mib=512, readable=(PYTHON, str(tmp_path / "agent.py")))
    paths = [str(tmp_path / "secret"), "/etc/passwd", "/proc/self/environ", "/proc/1", "/sys"]
    tries = [f"os.stat({path!r})" for path in (*paths, str(tmp_path / "agent.py"))]
    tries += [f"open({str(tmp_path / 'agent.py')!r}, 'w')", "open('/usr/bin/new', 'w')"]
    tries += [f"os.kill({os.getpid()}, 0)"]
    refused = [errno.ENOENT] * len(paths)
    found = errors(tries, box)
    assert found[: len(paths) + 1] == [*refused, 0]
    assert not {0} & set(found[len(paths) + 1 :])
    assert "opensesame" not in inside("import os; print(os.environ)").stdout
    assert inside("import os; print(os.environ['A'])", A="b").stdout == "b\n"


def test_no_descriptor_of_the_caller_or_the_jail_is_open():
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        opened = errors([f"os.fstat({number})" for number in range(1024)])
    assert opened == [0] * 3 + [errno.EBADF] * 1021


def test_programs_can_be_started_but_give_no_privilege():
    code = """
        import os, subprocess
        print(subprocess.check_output(["sh", "-c", "echo hi; id -u"], text=True))
        for command in ("unshare -rn true", "su -c true", "mount", "nsenter -t 1 -n true"):
            try:
                print(subprocess.run(command.split(), capture_output=True).returncode)
            except OSError as error:
                print(type(error).__name__)
    """
    lines = inside(textwrap.dedent(code)).stdout.split()
    assert lines[:2] == ["hi", "1000"]
    assert "0" not in lines[2:]


def test_calls_that_open_a_way_out_stay_refused_after_an_exec():
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for call in ("unshare(0x10000000)", "ptrace(0, 0, 0, 0)", "syscall(425, 1, 0)",
                     "memfd_create(b'x', 0)", "syscall(321, 0, 0, 0)", "chroot(b'.')",
                     "mount(b'none', b'/sandbox', b'tmpfs', 0, None)"):
            print(eval(f"libc.{call}"), ctypes.get_errno())
    """
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the calls are those of x86-64")
    assert set(inside(textwrap.dedent(code)).stdout.splitlines()) == {"-1 1"}


def test_calls_newer_than_the_list_of_calls_do_not_exist():
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for number in (450, 452, 457, 467, 500, 10000):
            print(libc.syscall(number, -1, 0, 0, 0), ctypes.get_errno())
    """
    assert set(inside(textwrap.dedent(code)).stdout.splitlines()) == {"-1 38"}


def test_a_command_that_forks_and_floods_is_held():
    code = """
        import os, sys, time
        children = 0
        try:
            while children < 100:
                if os.fork() == 0:
                    time.sleep(600)
                    os._exit(0)
                children += 1
        except OSError:
            pass
        sys.stdout.write("x" * 10_000_000)
        print(children)
    """
    end = inside(textwrap.dedent(code))
    assert end.code == 0
    assert len(end.stdout) == 1 << 16
    assert end.stdout.endswith("x15\n")
    assert imprisoned() == []


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("left", flush=True)
time.sleep({})
"""


@pytest.mark.parametrize("waits", [0, 600])
def test_all_processes_end_with_the_command_or_when_it_is_asked(waits):
    with BOX.start([PYTHON, "-I", "-S", "-"], stdin=DAEMON.format(waits)) as started:
        if waits:
            assert started.wait(1.0) is None
            started.end()
            started.end()
        end = started.wait(30.0)
        assert end.code == (-signal.SIGKILL if waits else 0)
    assert imprisoned() == []


def test_a_command_that_is_ended_while_it_ends_keeps_its_exit_code():
    for _ in range(20):
        with BOX.start(["sh", "-c", "exit 3"]) as started:
            select.select([started.status], [], [], 60.0)  # the exit code is known
            while started.process.poll() is None:
                started.end()
            end = started.wait(30.0)
        assert end.code == 3


def test_a_command_dies_with_the_process_that_started_it():
    code = """
        from gspo_env.sandbox import Sandbox
        with Sandbox(memory_mib=512).start(["sleep", "600"]) as started:
            print("begun", flush=True)
            started.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        assert eventually(lambda: imprisoned(process.pid))
        process.kill()
    assert eventually(lambda: not imprisoned(process.pid))


def test_commands_at_the_same_time_do_not_reach_each_other():
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {PORT})).sendall(b'NUMBER')"
    heard: dict[str, bytes] = {}

    def play(number):
        text = code.replace("NUMBER", number)
        with BOX.start([PYTHON, "-I", "-S", "-"], stdin=text) as started:
            started.listener.settimeout(60)
            line, _ = started.listener.accept()
            with line:
                heard[number] = line.recv(10)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(play, "0123"))
    assert heard == {str(n): str(n).encode() for n in range(4)}


def test_a_link_to_a_program_is_followed(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(PYTHON)
    first = str(tmp_path / "first")
    with Sandbox(memory_mib=512, readable=(first,)).start(
        [first, "-S", "-"], stdin="print(1)"
    ) as c:
        assert c.wait(30.0) == CommandEnd(code=0, stdout="1\n", stderr="")
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


@pytest.mark.parametrize("command", [["/nowhere/program"], ["none-of-this-name", "x"]])
def test_a_command_that_cannot_be_started_says_so(command):
    with BOX.start(command) as started:
        end = started.wait(30.0)
    assert end.code == 127
    assert f"{command[0]} cannot be started" in end.stderr
