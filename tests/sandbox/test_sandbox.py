"""Attacks on the sandbox: each succeeds outside, which shows that it is real, and fails inside.

Without isolation these tests fail and give the reason; `GSPO_ENV_NO_SANDBOX=1` skips them.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jails import eventually, imprisoned, program, require_isolation, run_python

from gspo_env.errors import ConfigError
from gspo_env.sandbox import Sandbox, Stop, find_missing

SECRET = "opensesame"
BOX = Sandbox(seconds=20.0)


@pytest.fixture(scope="module", autouse=True)
def isolation():
    """Fails or skips all tests on a machine that cannot isolate code."""
    require_isolation(find_missing())


def outside(code, **options):
    """The output of a program without a sandbox."""
    return run_python("-I", "-c", code, **options).stdout


def inside(code, box=BOX, **options):
    result = box.run(code, **options)
    assert result.isolated
    return result


FORK_BOMB = """
import os, time
children = 0
try:
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
        children += 1
except OSError as error:
    print(type(error).__name__)
print("children", children)
"""


MEMORY_BOMB = """
try:
    block = bytearray(300 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    print("took", len(block) >> 20)
except MemoryError as error:
    print(type(error).__name__)
"""


HIDDEN_MEMORY = """
import mmap, os
kept = 0
try:
    for n in range(20):  # each below the limit of a process and of a file, together 300 MiB
        fd = os.memfd_create(str(n))
        os.write(fd, bytes(15 * 2**20))
        kept += 15
except OSError as error:
    print(type(error).__name__)
print("kept", kept)
"""


SPLICED_MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for name in ("munmap", "madvise"):
    getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
size, huge, kept, ends = 1 << 21, 14, 0, []
for n in range(80):
    if n % 8 == 0:  # slots of a pipe
        ends.append(os.pipe())
    block = libc.mmap(None, 2 * size, 3, 0x22, -1, 0)
    place = (block + size - 1) // size * size
    libc.madvise(place, size, huge)
    ctypes.memset(place, 1, size)
    if libc.vmsplice(ends[-1][1], (ctypes.c_size_t * 2)(place, 4096), ctypes.c_size_t(1), 0) < 0:
        print(os.strerror(ctypes.get_errno()))
        break
    libc.munmap(block, 2 * size, 0)
    kept += 2
print("kept", kept)
"""


HUGE_PAGES = """
import ctypes, resource
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
print(libc.prctl(41, 0, 0, 0, 0), libc.prctl(42, 0, 0, 0, 0))
size = 1 << 21
pages = []
for _ in range(16):  # the memory may have no huge page free for some
    block = libc.mmap(None, 2 * size, 3, 0x22, -1, 0)
    place = (block + size - 1) // size * size
    libc.madvise(place, size, 14)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(place, 1, size)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pages.append("huge" if after - before < 100 else "small")
print(min(pages))
"""


def test_a_small_mapping_cannot_hold_a_huge_page():
    """A huge page of which all but 4 KiB is unmapped stays in memory: 2 MiB that count as 4 KiB."""
    without = outside(HUGE_PAGES).splitlines()
    assert without[0] == "0 0"
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert without[1] == "huge"
    assert inside(HUGE_PAGES).stdout == "-1 1\nsmall\n"


SHARED_MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size, kept = 16 << 20, 0
for n in range(10):
    block = libc.mmap(None, size, 3, flags, -1, 0)
    if block == 2**64 - 1:
        print(os.strerror(ctypes.get_errno()))
        break
    ctypes.memset(block, 1, size)
    libc.munmap(block + 4096, size - 4096)
    kept += 16
print("kept", kept)
"""


@pytest.mark.parametrize("flags", [0x21, 0x23], ids=["MAP_SHARED", "MAP_SHARED_VALIDATE"])
def test_shared_memory_cannot_be_had(flags):
    """Shared memory stays until its last page is unmapped: 16 MiB that count as 4 KiB."""
    code = program(SHARED_MEMORY, flags=flags)
    if flags == 0x21:
        assert outside(code) == "kept 160\n"
    box = Sandbox(memory_mib=64, seconds=20.0)
    assert inside(code, box).stdout.endswith("kept 0\n")
    private = program(SHARED_MEMORY, flags=0x22)  # unmapping frees this, so it is allowed
    assert inside(private, box).stdout == "kept 160\n"


PENDING_SIGNALS = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
kept = 0
while kept < 1000 and libc.sigqueue(os.getpid(), 40, ctypes.c_void_p()) == 0:
    kept += 1
print("kept", kept)
"""


@pytest.mark.parametrize(
    ("code", "before", "after", "limits"),
    [
        (FORK_BOMB, "children 50\n", "BlockingIOError\nchildren 0\n", {}),
        (FORK_BOMB, "children 50\n", "BlockingIOError\nchildren 7\n", {"processes": 8}),
        (MEMORY_BOMB, "took 300\n", "MemoryError\n", {}),
        (MEMORY_BOMB, "took 300\n", "took 300\n", {"memory_mib": 512}),
        (HIDDEN_MEMORY, "kept 300\n", "PermissionError\nkept 0\n", {}),
        (SPLICED_MEMORY, "kept 160\n", "Operation not permitted\nkept 0\n", {"memory_mib": 64}),
        (PENDING_SIGNALS, "kept 1000\n", "kept 64\n", {}),
    ],
)
def test_what_fills_the_machine_meets_its_limit(code, before, after, limits):
    assert outside(code) == before
    assert inside(code, Sandbox(seconds=20.0, **limits)).stdout == after
    assert imprisoned() == []


STANDARD_INPUT = """
import os
kept = 0
try:
    for n in range(10):
        kept += os.write(0, bytes(2**20)) >> 20
except OSError as error:
    print(type(error).__name__)
print("kept", kept, len(os.pread(0, 9, 0)))
"""


def test_standard_input_cannot_hold_memory(tmp_path):
    with (tmp_path / "file").open("wb+") as file:
        assert outside(STANDARD_INPUT, stdin=file) == "kept 10 9\n"
    assert inside(STANDARD_INPUT, stdin="hello").stdout == "PermissionError\nkept 0 5\n"


BIG_FILE = """
import os
with open(path, "wb") as file:
    file.seek(2**30 - 1)
    file.write(b"x")
print(os.path.getsize(path))
"""

MANY_FILES = """
import os
written = 0
try:
    for n in range(60):
        with open(os.path.join(folder, str(n)), "wb") as file:
            written += file.write(bytes(2**20))
except OSError as error:
    print(error.strerror)
print(written >> 20)
"""


def test_a_file_of_one_gigabyte_and_a_full_disk_are_refused(tmp_path):
    path = tmp_path / "big"
    assert outside(program(BIG_FILE, path=str(path))) == f"{2**30}\n"
    path.unlink()
    result = inside(program(BIG_FILE, path="big"))
    assert "File too large" in result.stderr
    assert result.stdout == ""
    assert outside(program(MANY_FILES, folder=str(tmp_path))) == "60\n"
    said = inside(program(MANY_FILES, folder=".")).stdout.splitlines()
    assert said[0] == "No space left on device"
    assert int(said[1]) <= 32
    assert inside("import os; print(os.listdir('.'))").stdout == "[]\n"


CONNECT = """
import socket
for kind, address in addresses:
    try:
        with socket.socket(getattr(socket, kind)) as line:
            line.connect(address)
            line.sendall(b"secret")
            print("sent")
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.fixture
def listeners():
    """Listeners on loopback and on an abstract Unix name, which no file system hides."""
    tcp, unix = socket.socket(), socket.socket(socket.AF_UNIX)
    tcp.bind(("127.0.0.1", 0))
    name = f"\0gspo-{os.getpid()}"
    unix.bind(name)
    for line in (tcp, unix):
        line.listen()
        line.setblocking(False)
    with tcp, unix:
        yield [("AF_INET", tcp.getsockname(), tcp), ("AF_UNIX", name, unix)]


def test_no_connection_reaches_a_listener(listeners):
    code = program(CONNECT, addresses=[entry[:2] for entry in listeners])
    assert "PermissionError" in inside("import socket; socket.socket(socket.AF_VSOCK)").stderr
    assert outside(code) == "sent\nsent\n"
    for _, _, line in listeners:
        assert line.accept()[0].recv(10) == b"secret"
    assert inside(code).stdout == "PermissionError\n" * 2
    for _, _, line in listeners:
        with pytest.raises(BlockingIOError):
            line.accept()


PAIR = """
import socket
try:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    here.sendto(b"secret", path)
    print("sent")
except OSError as error:
    print(type(error).__name__)
"""


def test_no_datagram_reaches_a_socket_in_a_readable_folder(tmp_path):
    tmp_path.chmod(0o755)
    path = tmp_path / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(path))
        path.chmod(0o777)
        line.setblocking(False)
        code = program(PAIR, path=str(path))
        assert outside(code) == "sent\n"
        assert line.recv(10) == b"secret"
        box = Sandbox(readable=(str(tmp_path),), seconds=20.0)
        assert inside(code, box).stdout == "PermissionError\n"
        with pytest.raises(BlockingIOError):
            line.recv(10)


ENVIRONMENT = """
import glob, os
found = list(os.environb.values())
for path in glob.glob("/proc/*/environ"):
    try:
        found += open(path, "rb").read().split(b"\\0")
    except OSError:
        pass
print(sum(secret.encode() in value for value in found))
"""


def test_the_parents_environment_cannot_be_read(monkeypatch):
    monkeypatch.setenv("SANDBOX_TEST_TOKEN", SECRET)
    code = program(ENVIRONMENT, secret=SECRET)
    assert int(outside(code)) >= 2
    assert inside(code).stdout == "0\n"


READ = """
import os
found = 0
for path in paths:
    try:
        found += secret in open(path).read()
    except OSError:
        pass
for fd in range(3, 64):
    try:
        found += secret.encode() in os.pread(fd, 100, 0)
    except OSError:
        pass
print(found)
"""


def test_files_outside_and_open_descriptors_cannot_be_read(tmp_path):
    path = tmp_path / "token"
    path.write_text(SECRET)
    paths = [str(path), *(f"/proc/{pid}/root{path}" for pid in ("self", 1, os.getpid()))]
    paths += [f"{'../' * 12}{path}", f"/.host{path}", f"{os.path.dirname(os.__file__)}/../..{path}"]
    code = program(READ, paths=paths, secret=SECRET)
    with path.open() as file:
        os.set_inheritable(file.fileno(), True)
        assert int(outside(code, close_fds=False, cwd="/")) >= 4
        assert inside(code).stdout == "0\n"


def test_only_the_interpreters_libraries_can_be_seen(tmp_path):
    code = "import os; print(*os.listdir('/'))"
    top = Path(os.path.realpath(sys.base_prefix)).parts[1]
    known = {"dev", "lib", "lib64", "sandbox", "tmp", "usr", top}
    assert set(outside(code).split()) > known - {"sandbox"} - {"lib64"}
    assert set(inside(code).stdout.split()) <= known
    tmp_path.chmod(0o755)
    (tmp_path / "helper.py").write_text("answer = 42")
    (tmp_path / "helper.py").chmod(0o644)
    box = Sandbox(readable=(str(tmp_path),), seconds=20.0)
    assert inside("import helper; print(helper.answer)", box).stdout == "42\n"
    assert "Error" in inside("import helper").stderr


WRITE = """
import os
for path in paths:
    try:
        open(path, "w").write("x")
        print("wrote")
    except OSError as error:
        print(type(error).__name__)
"""


def test_nothing_outside_can_be_written(tmp_path):
    readable, plain = tmp_path / "readable", tmp_path / "plain"
    readable.mkdir()
    plain.mkdir()
    readable.chmod(0o777)
    paths = [str(readable / "new"), str(plain / "new")]
    assert outside(program(WRITE, paths=paths)) == "wrote\nwrote\n"
    for path in paths:
        os.unlink(path)
    paths += ["/new", "/dev/new", "/lib/new", f"{os.path.dirname(os.__file__)}/new"]
    box = Sandbox(readable=(str(readable),), seconds=20.0)
    said = inside(program(WRITE, paths=paths), box).stdout.split()
    assert len(said) == len(paths)
    assert "wrote" not in said
    assert not any(os.path.exists(path) for path in paths)


@pytest.mark.parametrize("mask", [0o000, 0o027, 0o077, 0o777])
def test_isolation_does_not_depend_on_the_users_umask(mask):
    before = os.umask(mask)
    try:
        result = inside("import os; print(oct(os.umask(0)), oct(os.stat('/usr').st_mode))")
    finally:
        os.umask(before)
    assert result.stdout == "0o22 0o40755\n", result


def test_signals_do_not_reach_the_parent():
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    try:
        code = f"import os\nos.kill({os.getpid()}, {int(signal.SIGUSR1)})"
        outside(code)
        assert caught == [signal.SIGUSR1]
        assert "ProcessLookupError" in inside(code).stderr
        for pid in (-1, 1):
            result = inside(f"import os\ntry: os.kill({pid}, 9)\nfinally: print('alive')")
            assert result.stdout == "alive\n"
        assert caught == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def timed_out(code, prints=True, **limits):
    """The result at the time limit, which is longer where a busy machine had not begun by then."""
    for seconds in (0.5, 20.0):
        result = inside(code, Sandbox(seconds=seconds, **limits))
        assert result.stopped is Stop.TIME
        if result.stdout or not prints:
            break
    return result


def test_an_infinite_loop_ends_by_the_wall_clock():
    for code in ("while True: pass", "import time\nprint('begun')\ntime.sleep(600)"):
        with pytest.raises(subprocess.TimeoutExpired):
            outside(code, timeout=0.5)
        result = timed_out(code, "print" in code)
        assert (result.exit_code, result.ok) == (None, False)
    assert result.stdout == "begun\n"
    assert imprisoned() == []


def test_an_infinite_loop_ends_by_the_processors_clock_even_where_it_ignores_the_signal():
    box = Sandbox(cpu_seconds=1, seconds=60.0)
    assert inside("while True: pass", box).stopped is Stop.CPU
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert inside(stubborn, box).exit_code == -signal.SIGKILL


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_output_flood_is_cut(stream):
    code = f"import sys\nwhile True: sys.{stream}.write('flood ' * 1000)"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code], **{stream: subprocess.PIPE}
    ) as process:
        assert len(getattr(process, stream).read(1 << 20)) == 1 << 20
        process.kill()
    result = inside(code)
    assert result.stopped is Stop.OUTPUT
    assert len(getattr(result, stream)) == 64 << 10


def test_what_a_flood_leaves_is_not_left_to_chance():
    code = "import os, time\nos.write(2, b'early')\ntime.sleep(0.5)\nos.write(1, b'x' * 70000)"
    result = inside(code)
    assert (result.stopped, result.stdout, result.stderr) == (Stop.OUTPUT, "x" * (64 << 10), "")
    code = "import os\nos.write(1, b'x' * 70000)\nos.write(2, b'late')"
    results = [inside(code) for _ in range(20)]
    assert {(r.stopped, r.stdout, r.stderr) for r in results} == {
        (result.stopped, result.stdout, result.stderr)
    }


DOUBLE_FORK = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for _ in range(50):
            with open(path, "a") as file:
                file.write("x")
            time.sleep(0.1)
    os._exit(0)
while not os.path.exists(path):
    time.sleep(0.01)
print("escaped", flush=True)
time.sleep(wait)
"""


def test_a_double_fork_does_not_outlive_the_run(tmp_path):
    path = tmp_path / "heartbeat"
    code = program(DOUBLE_FORK, path=str(path), wait=60)
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout.readline() == b"escaped\n"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        beats = path.stat().st_size
        assert eventually(lambda: path.stat().st_size > beats)  # outside, it survives

    box = Sandbox(processes=8, seconds=20.0)
    by_itself = inside(program(DOUBLE_FORK, path="heartbeat", wait=0), box)
    assert (by_itself.stdout, by_itself.stopped) == ("escaped\n", None)
    assert imprisoned() == []
    assert timed_out(program(DOUBLE_FORK, path="heartbeat", wait=60), processes=8).stdout
    assert imprisoned() == []


SYSTEM_CALLS = {
    "a new user namespace": ("unshare", 0x10000000),
    "a memory file": ("memfd_create", b"x", 0),
    "another root": ("chroot", b"."),
    "tracing": ("ptrace", 0, 0, 0, 0),
    "a queue": ("msgget", 0, 0o1600),
    "shared memory": ("shmget", 0, 4096, 0o1600),
    "another program": ("execv", b"/usr/lib/x", None),
    "a pair of sockets": ("socketpair", 1, 1, 0, None),
    "the kernel's log": ("klogctl", 10, None, 0),
    "watches of files": ("inotify_add_watch", 0, b"/lib", 2),
    "a mount": ("mount", b"none", b"/sandbox", b"tmpfs", 0, None),
}


if os.uname().machine == "x86_64":
    SYSTEM_CALLS["a table of segments"] = ("modify_ldt", 0, None, 0)


@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_system_calls_that_open_a_way_out_are_refused(name):
    call, *arguments = SYSTEM_CALLS[name]
    code = f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.{call}(*{arguments!r})
        print(result >= 0, ctypes.get_errno())
    """
    assert inside(textwrap.dedent(code)).stdout == "False 1\n"
    if name in ("a new user namespace", "a memory file", "tracing", "a queue", "shared memory"):
        assert outside(textwrap.dedent(code)).startswith("True")


def test_no_privilege_is_left():
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        data = (ctypes.c_uint32 * 6)()
        libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
        bounding = any(libc.prctl(23, c) == 1 for c in range(64))
        print(list(data), bounding, libc.prctl(39, 0, 0, 0, 0))
        for change in (os.setuid, os.setgid):
            try:
                change(0)
                print("became root")
            except OSError as error:
                print(type(error).__name__)
    """
    said = inside(textwrap.dedent(code)).stdout.splitlines()
    assert said[0] == "[0, 0, 0, 0, 0, 0] False 1"
    assert "became root" not in said


def test_runs_at_the_same_time_share_nothing():
    def play(number):
        code = program("open('mine', 'x').write(str(n)); print(open('mine').read())", n=number)
        return inside(code).stdout

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(24))) == [f"{n}\n" for n in range(24)]
    assert imprisoned() == []


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "exit_code"),
    [
        ("", "", "", 0),
        ("print(input()[::-1])", "olleh\n", "", 0),
        ("x = 6\nx * 7", "", "", 0),
        ("import sys; sys.exit(3)", "", "", 3),
        ("exit('no')", "", "no\n", 1),
        ("print('\\ud800')", "\\ud800\n", "", 0),
        ("1 +", "", "SyntaxError: invalid syntax", 1),
        ("x = 1\n\0", "", "null bytes", 1),
        ("def f():\n    return 1 / 0\nf()", "", "    return 1 / 0\n", 1),
        ("import os; os.abort()", "", "", -signal.SIGABRT),
        ("import os; os.write(1, b'\\xff')", "\ufffd", "", 0),
    ],
)
def test_a_program_behaves_as_it_would_on_a_command_line(code, stdout, stderr, exit_code):
    result = inside(code, stdin="hello")
    assert (result.stdout, result.exit_code, result.stopped) == (stdout, exit_code, None)
    assert stderr in result.stderr
    assert result.ok == (exit_code == 0)
    assert "jail" not in result.stderr


def test_with_echo_a_last_expression_is_printed_as_on_a_console():
    assert inside("x = 6\nx * 7", echo=True).stdout == "42\n"
    assert inside("x = 6\nNone", echo=True).stdout == ""
    assert inside("print(1); 'a'", echo=True).stdout == "1\n'a'\n"
    assert "SyntaxError" in inside("x = = 2", echo=True).stderr


@settings(max_examples=25)
@given(st.text(), st.text())
def test_any_text_can_be_run(code, stdin):
    result = inside(code, stdin=stdin)
    (result.stdout + result.stderr).encode()


REFUSED = """
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(sys.argv[1])))
import jail
from gspo_env.errors import SandboxUnavailableError
from gspo_env.sandbox import Sandbox
jail.deny({"unshare": jail.DENIED["unshare"]})  # a machine that grants no namespaces
try:
    Sandbox().run("print(1)")
except SandboxUnavailableError as error:
    print(error)
box = Sandbox(allow_unsafe=True, seconds=1.0)
print(box.check(), box.run("print(2)"))
print(box.run("while True: pass").stopped, box.run("x = bytearray(2**30)").exit_code)
print(box.run("import os; os.setsid() if os.fork() == 0 else 0\\nwhile True: pass").stopped)
"""


def test_without_isolation_it_refuses_unless_told_otherwise():
    import gspo_env.sandbox

    file = gspo_env.sandbox.__file__
    done = run_python("-c", REFUSED, file)
    refusal, unsafe, limits, escaped = done.stdout.splitlines()
    assert "unshare of user, mount, PID and network namespaces: Operation not perm" in refusal
    assert "allow_unsafe=True" in refusal
    assert "user.max_user_namespaces" in refusal
    assert unsafe.startswith("False SandboxResult(stdout='2\\n', stderr='', exit_code=0")
    assert "isolated=False" in unsafe
    assert limits == "time 1"
    assert escaped == "time"
    assert "without isolation" in done.stderr


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0.0}, {"processes": 0}, {"memory_mib": 1}, {"readable": ("/nowhere",)}]
)
def test_impossible_limits_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sandbox(**wrong)


def test_a_trial_that_fails_is_repeated_a_minute_later_and_a_success_is_kept():
    code = """
        import time
        from gspo_env import sandbox
        def fail(*_):
            raise sandbox.SandboxUnavailableError("no process can be started now")
        launch, sandbox.launch, now = sandbox.launch, fail, time.monotonic
        print(sandbox.find_missing())
        sandbox.launch = launch
        print(sandbox.find_missing())
        time.monotonic = lambda: now() + 100
        print(sandbox.find_missing())
        sandbox.launch = fail
        print(sandbox.find_missing())
    """
    done = run_python("-c", textwrap.dedent(code), check=True)
    assert done.stdout.splitlines() == ["no process can be started now"] * 2 + ["None"] * 2
