"""The jail and containers as sandboxes for several commands: the same promises of both."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from support.containers import IMAGE, PROGRAM, require_image
from support.jails import eventually, program, require_isolation, run_python

from gspo_env.errors import ConfigError, EnvironmentCrashError, SandboxUnavailableError
from gspo_env.sandbox import Sandbox, Stop, find_missing_for_commands
from gspo_env.sandbox.containers import Containers, build, call, image_files, read_containers
from gspo_env.sandbox.session import pack

CONTAINER = pytest.param("container", marks=pytest.mark.containers)
FOLDERS = ("/app", "/logs")


def containers(**limits):
    return Containers(image=require_image(), program=PROGRAM, **limits)


@pytest.fixture(params=["jail", CONTAINER])
def box(request):
    if request.param == "container":
        return containers(processes=32, disk_mib=8)
    require_isolation(find_missing_for_commands())
    return Sandbox(cpu_seconds=60, memory_mib=512, processes=32, disk_mib=8)


@pytest.fixture
def session(box):
    opened = box.open(FOLDERS)
    yield opened
    opened.stop()


def shell(session, text, **options):
    return session.exec(["bash", "-c", text], **options)


def test_files_and_processes_stay_between_commands_until_the_stop(session, tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("a", "folder/b"):
        (tmp_path / name).write_bytes(b"\0" + name.encode())
    session.put("/app", pack(tmp_path))
    assert session.get("/app/folder/b") == b"\0folder/b"
    assert session.get("/app/none") is None
    assert shell(session, "ls; echo two >&2; exit 3").stdout == "a\nfolder\n"
    ended = shell(session, "echo two >&2; exit 3")
    assert (ended.stderr, ended.exit_code, ended.ok) == ("two\n", 3, False)
    shell(session, "(while :; do date +%s%N >/logs/beat; sleep 0.05; done) &")
    before = session.get("/logs/beat")
    assert eventually(lambda: session.get("/logs/beat") != before)
    session.kill()
    last = session.get("/logs/beat")
    shell(session, "sleep 0.2")
    assert session.get("/logs/beat") == last
    assert session.exec(["cat"], stdin=b"in").stdout == "in"
    assert shell(session, "echo $A", variables={"A": "of the call"}).stdout == "of the call\n"


def test_a_command_gets_its_input_and_variables_and_each_byte_of_output_comes_back(session):
    values = {"A": 'it\'s "$B" `x` \\n\nüöä\t', "B": ""}
    assert shell(session, 'printf %s "$A$B"', variables=values).stdout == values["A"]
    assert shell(session, 'printf %s "${A-unset}"').stdout == "unset"
    assert session.exec(["printf", "%s", values["A"]]).stdout == values["A"]
    unread = shell(session, "exit 4", stdin=bytes(1 << 21))
    assert (unread.exit_code, unread.stdout, unread.stderr) == (4, "", "")
    assert shell(session, "head -c 3 | wc -c; wc -c", stdin=bytes(1 << 21)).stdout.split()[0] == "3"
    assert shell(session, "wc -c", stdin=bytes(1 << 21)).stdout.strip() == str(1 << 21)
    odd = shell(session, "printf '\\0\\377x'; printf '\\n\\n' >&2; exit 255")
    assert (odd.stdout, odd.stderr, odd.exit_code) == ("\0\ufffdx", "\n\n", 255)
    most = shell(session, "printf %065536d 0; printf %065536d 0 >&2")
    assert (most.ok, len(most.stdout), len(most.stderr)) == (True, 65536, 65536)


@pytest.mark.containers
def test_a_command_that_kills_all_of_a_container_ends_only_commands():
    opened = containers().open(FOLDERS)
    for text in ("kill -9 -1; sleep 60", "(sleep 0.3; kill -9 -1) & sleep 60"):
        assert shell(opened, f"printf before; {text}").exit_code == 137
        assert shell(opened, "printf after").stdout == "after"
    frozen = "for p in /proc/[0-9]*; do kill -STOP ${p#/proc/}; done"
    assert not shell(opened, frozen, seconds=1.0).ok
    assert shell(opened, "printf after").stdout == "after"
    opened.stop()


@pytest.mark.containers
def test_what_a_command_leaves_writes_into_no_output_after_a_kill():
    """It may write where the shell that ran it writes, which is of the same user."""
    opened = containers().open(FOLDERS)
    forge = "for p in /proc/[0-9]*; do echo forged >$p/fd/1; echo forged >$p/fd/2; done"
    shell(opened, f"(while :; do {forge}; sleep 0.01; done) >/dev/null 2>&1 &")
    for _ in range(2):
        opened.kill()
        for _ in range(5):
            shown = shell(opened, "printf true")
            assert (shown.stdout, shown.stderr, shown.exit_code) == ("true", "", 0)
    opened.stop()


def test_a_command_has_limits_of_time_output_and_disk(session):
    late = shell(session, "echo early; sleep 600", seconds=1.0)
    assert (late.stdout, late.stopped, late.exit_code) == ("early\n", Stop.TIME, None)
    flood = shell(session, "while :; do echo flood; done")
    assert (flood.stopped, len(flood.stdout)) == (Stop.OUTPUT, 64 << 10)
    full = shell(session, "head -c 20000000 /dev/urandom >/app/x || echo full")
    assert full.stdout == "full\n"
    shell(session, "rm /app/x")
    assert shell(session, "echo fine").stdout == "fine\n"
    assert shell(session, "kill -9 $$").exit_code in (-signal.SIGKILL, 137)


ATTACKS = {
    "the network": "socket.create_connection(('1.1.1.1', 53), 2)",
    "a listener of the machine": "socket.create_connection(('127.0.0.1', {port}), 2)",
    "a name without a file": "socket.socket(socket.AF_UNIX).connect({name!r})",
    "a file of the root": "open('/usr/x', 'w')",
    "the trainer's file": "open({path!r})",
    "a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'w')",
    "the kernel's memory": "open('/proc/kcore', 'rb').read(1)[0]",
    "the kernel's log": "assert libc.klogctl(10, None, 0) >= 0",
    "a mount": "assert libc.mount(b'n', b'/tmp', b'tmpfs', 0, 0) == 0",
    "another root": "os.chroot('/tmp')",
    "root": "os.setuid(0)",
    "capabilities": "assert any(libc.prctl(23, n) == 1 for n in range(41))",
    "privileges of a program": "assert libc.prctl(39, 0, 0, 0, 0) != 1",
    "a device": "os.mknod('/tmp/d', 0o60600, os.makedev(8, 0))",
    "another user": "os.chown('/tmp', 0, 0)",
    "a process outside": "os.kill({pid}, 0)",
    "tracing of process 1": "assert libc.ptrace(16, 1, 0, 0) == 0",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "a higher limit": "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))",
    "a secret": "assert 'opensesame' in str(os.environ)",
    "a secret of a process": "assert b'opensesame' in b''.join(map(read, glob('/proc/*/environ')))",
    "an open file of the trainer": "assert len(os.listdir('/proc/self/fd')) > 4",
    "more processes": "for _ in range(60):\n    os.fork() or (time.sleep(2), os._exit(0))",
    "more memory": "x = bytearray(700 << 20); x[::4096] = b'x' * len(x[::4096])",
    "memory files": "for n in range(40):\n    os.write(os.memfd_create(str(n)), bytes(15 << 20))",
    "shared memory": "x = mmap.mmap(-1, 700 << 20); x.write(bytes(700 << 20))",
    "the disk": "assert open('/tmp/x', 'wb', 0).write(bytes(9 << 20)) == 9 << 20",
    "the disk of /dev/shm": "assert open('/dev/shm/x', 'wb', 0).write(bytes(9 << 20)) == 9 << 20",
}
OPENING = """
import ctypes, mmap, os, resource, socket, time
from glob import glob
libc = ctypes.CDLL(None)
def read(path):
    try:
        return open(path, "rb").read()
    except OSError:
        return b""
"""


@pytest.mark.containers
def test_what_the_jail_refuses_a_container_refuses_too(tmp_path, monkeypatch):
    """The attacks of `test_sandbox.py` and `test_commands.py` that a container can be asked."""
    monkeypatch.setenv("HTTP_PROXY", "http://opensesame@127.0.0.1:1")
    monkeypatch.setenv("TOKEN", "opensesame")
    (tmp_path / "secret").write_text("opensesame")
    session = containers(processes=32, memory_mib=256, disk_mib=8).open()
    done = []
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0gspo-{os.getpid()}")
        unix.listen()
        values = {"pid": os.getpid(), "path": str(tmp_path / "secret")}
        values |= {"port": tcp.getsockname()[1], "name": unix.getsockname().decode()}
        for attack, code in ATTACKS.items():
            line = ["python3", "-I", "-c", OPENING + code.format(**values)]
            result = session.exec(line, seconds=60.0)
            if result.ok or "SyntaxError" in result.stderr or "NameError" in result.stderr:
                done.append((attack, result))
    assert session.exec(["true"]).ok
    session.stop()
    assert done == []


@pytest.mark.containers
def test_a_command_that_exceeds_the_memory_is_killed_says_so_and_its_neighbors_go_on():
    box = containers(memory_mib=256, disk_mib=256)
    sessions = [box.open(FOLDERS), box.open(FOLDERS)]
    greedy = ["python3", "-c", "x = bytearray(2 << 30); x[::4096] = b'x' * len(x[::4096])"]
    for _ in range(2):
        result = sessions[0].exec(greedy)
        assert (result.stopped, result.exit_code, result.ok) == (Stop.MEMORY, None, False)
        assert shell(sessions[0], "kill -9 $$").stopped is None
    assert box.run(greedy[-1]).stopped is Stop.MEMORY
    for session in sessions:
        assert shell(session, "printf fine").stdout == "fine"
        session.stop()


@pytest.mark.containers
def test_full_folders_leave_memory_for_the_commands_that_empty_them():
    """Their files are in memory; without the bound the kernel ends the whole container."""
    opened = containers(memory_mib=128, disk_mib=128).open(FOLDERS)
    for folder in ("/app", "/logs", "/tmp", "/var/tmp", "/run", "/dev/shm"):
        assert shell(opened, f"cat /dev/zero >{folder}/x || printf full").stdout == "full"
    assert shell(opened, "rm /app/x && printf fine").stdout == "fine"
    opened.stop()


@pytest.mark.containers
@pytest.mark.parametrize("number", [1, 10_000])
def test_processes_and_processors_of_a_container_are_limited(number):
    opened = containers(processes=16, cpus=0.5).open()
    text = f"for n in $(seq {number}); do sleep 60 & done; printf $(jobs -p | wc -l)"
    shown = shell(opened, f"{{ {text}; }} 2>/dev/null", seconds=5.0)
    assert (shown.stdout == "1") == (number == 1)
    opened.kill()
    code = "import time\nbegan = time.monotonic()\nwhile time.monotonic() < began + 2: pass"
    used = opened.exec(["python3", "-c", f"{code}\nprint(time.process_time())"])
    assert float(used.stdout) < 1.5
    opened.stop()


@pytest.mark.containers
def test_limits_that_a_machine_does_not_set_are_named(monkeypatch, caplog):
    box = containers(seconds=11.0)
    assert box.check()
    assert "no limit" not in caplog.text
    flags = Containers._flags
    kept = ("--memory", "--pids-limit", "--cpus")
    unlimited = lambda self: [f for f in flags(self) if not f.startswith(kept)]  # noqa: E731
    monkeypatch.setattr(Containers, "_flags", unlimited)
    assert containers(seconds=12.0).check()
    assert "no limit on cpu, memory" in caplog.text


@pytest.mark.containers
def test_an_image_without_a_program_is_refused_before_a_run():
    with pytest.raises(SandboxUnavailableError, match="has no nonsense, other"):
        containers().check("bash", "nonsense", "other")


@pytest.mark.containers
def test_code_runs_in_a_new_container_as_on_a_console():
    box = containers()
    assert box.run("x = 6\nx * 7", echo=True).stdout == "42\n"
    assert box.run("x = 6\nx * 7").stdout == ""
    assert box.run("print(input()[::-1])", stdin="hello").stdout == "olleh\n"
    assert box.run("open('/tmp/kept', 'w')").ok
    assert "FileNotFoundError" in box.run("open('/tmp/kept')").stderr
    assert containers(seconds=1.0).run("while True: pass").stopped is Stop.TIME


@pytest.mark.containers
def test_a_command_in_a_container_reaches_one_address():
    code = "import socket; print(socket.create_connection(('127.0.0.1', 8000)).recv(9).decode())"
    with containers().start(["python3", "-c", code]) as started:
        line, _ = started.listener.accept()
        with line:
            line.sendall(b"from you")
        end = started.wait(60.0)
    assert (end.stdout, end.code) == ("from you\n", 0)


def of_process(pid):
    listed = call(PROGRAM, "ps", "--all", "--format", "{{.ID}} {{.Labels}}").stdout
    return [row for row in listed.splitlines() if re.search(f"gspo-env[:=]{pid}-", row)]


@pytest.mark.containers
@pytest.mark.parametrize("command", [["kill"], ["rm", "--force"]])
def test_a_container_that_is_ended_from_outside_is_a_crash_and_nothing_is_left(command):
    opened = containers().open()
    (row,) = of_process(os.getpid())
    call(PROGRAM, *command, row.split()[0])
    with pytest.raises(EnvironmentCrashError, match="ended from outside"):
        shell(opened, "echo")
    opened.stop()
    assert eventually(lambda: of_process(os.getpid()) == [])  # docker removes it in its own time


KILLED = """
import os, signal, sys
from gspo_env.sandbox import containers
if not guarded:
    containers._sweeper = lambda *_: None
box = containers.Containers(image=image, program=program)
opened = [box.open(), box.open()]
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.containers
@pytest.mark.parametrize("guarded", [True, False])
def test_nothing_is_left_of_a_trainer_that_was_killed(guarded):
    """By the guard of the trainer; where that was killed too, at the next start."""
    code = program(KILLED, image=require_image(), guarded=guarded, program=PROGRAM)
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        process.wait()
    if not guarded:
        assert len(of_process(process.pid)) == 2
        check = f"from gspo_env.sandbox.containers import *; remove_leftovers({PROGRAM!r})"
        assert "removing 2 containers" in run_python("-c", check).stderr
    assert eventually(lambda: of_process(process.pid) == [])


@pytest.mark.containers
def test_an_image_is_built_once_without_a_network_and_a_missing_base_is_named(tmp_path):
    require_image()
    (tmp_path / "x").write_text("1")
    base, tag = IMAGE.split(":")
    (tmp_path / "Dockerfile").write_text(
        f"ARG TAG={tag}\nARG B='{base}'\nFROM ${{B}}:$TAG AS first\nWORKDIR /app\nCOPY x .\n"
        "FROM first\nCOPY --from=first /app /app\n"
    )
    name = build(PROGRAM, tmp_path, "Test one")
    assert build(PROGRAM, tmp_path, "Test one") == name
    (tmp_path / "x").write_text("2")
    other = build(PROGRAM, tmp_path, "Test one")
    assert other != name
    call(PROGRAM, "rmi", name, other)
    for line, message in (
        ("FROM nowhere.invalid/base:1", f"{PROGRAM} pull nowhere.invalid/base:1"),
        (f"FROM {IMAGE}\nRUN bash -c 'exec 3<>/dev/tcp/1.1.1.1/53'", "without a network"),
        (f"FROM {IMAGE}\nADD https://nowhere.invalid/x /app/", "ADD https://nowhere.invalid/x"),
        (f"FROM {IMAGE}\nCOPY --from=nowhere.invalid/y:1 /x /app/", "pull nowhere.invalid/y:1"),
        ("ARG B=nowhere.invalid/z\nFROM ${B}:1", "pull nowhere.invalid/z:1"),
        ("FROM $UNKNOWN", r"pull \$UNKNOWN"),
        (f"FROM {IMAGE}\nCOPY ../../secret /app/", "escaping|outside|forbidden|without a network"),
    ):
        (tmp_path / "Dockerfile").write_text(line)
        with pytest.raises(SandboxUnavailableError, match=message):
            build(PROGRAM, tmp_path, "Test two")
    # docker keeps the container of a command that failed, unless told
    line = ("ps", "--all", "--no-trunc", "--format", "{{.Command}}")
    assert "/dev/tcp/1.1.1.1" not in call(PROGRAM, *line).stdout


@pytest.mark.containers
@pytest.mark.skipif(PROGRAM != "podman", reason="docker mounts volumes of an image")
def test_a_volume_of_an_image_is_no_folder_without_a_limit(tmp_path):
    require_image()
    text = f'FROM {IMAGE}\nRUN ["mkdir", "-m", "777", "/data"]\nVOLUME /data\n'
    (tmp_path / "Dockerfile").write_text(text)
    name = build(PROGRAM, tmp_path, "Test volume")
    opened = Containers(image=name, program=PROGRAM).open()
    assert "Read-only file system" in shell(opened, "touch /data/x").stderr
    opened.stop()
    volumes = call(PROGRAM, "volume", "ls", "--quiet").stdout
    assert image_files(PROGRAM, name, "/data")
    assert call(PROGRAM, "volume", "ls", "--quiet").stdout == volumes
    call(PROGRAM, "rmi", name)


@pytest.mark.containers
def test_a_missing_image_is_refused_before_and_lost_during_a_run():
    require_image()
    box = Containers(image="localhost/none:1", program=PROGRAM)
    with pytest.raises(SandboxUnavailableError, match=f"{PROGRAM} pull localhost/none:1"):
        box.check()
    with pytest.raises(EnvironmentCrashError, match="localhost/none:1"):
        box.open()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("debian", "expected podman:IMAGE or docker:IMAGE"),
        ("lxc:debian", "expected podman:IMAGE"),
        ({"image": "x", "cpu": 1}, "'cpu', expected at_once, cpus"),
        ({"image": "x", "program": "lxc"}, "expected 'podman' or 'docker'"),
        ({"image": "x", "memory_mib": 0}, "memory_mib is 0"),
    ],
)
def test_wrong_settings_of_containers_are_one_sentence(value, message):
    with pytest.raises(ConfigError, match=message):
        read_containers(value, "Env: sandbox")


def test_without_the_program_the_error_names_how_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match="apt-get install podman runc"):
        call("podman", "version")


def test_a_command_that_kills_the_jail_loses_the_episode():
    require_isolation(find_missing_for_commands())
    opened = Sandbox(cpu_seconds=60, memory_mib=512, processes=8).open()
    with pytest.raises(EnvironmentCrashError):
        shell(opened, "kill -9 -1; sleep 60")
    with pytest.raises(EnvironmentCrashError):
        shell(opened, "echo")
    opened.stop()
