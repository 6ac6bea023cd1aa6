"""The filter of system calls of the jail; uses the standard library only.

Code may make no call in `DENIED`. A command may start programs, and may make those of `CHECKED`
with the arguments that TCP and streams between its own processes need.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

NAMESPACES = {
    "mnt": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
ALL_NAMESPACES = sum(NAMESPACES.values())
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 22, 38, 41
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _GIVE = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _REFUSE = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM
_NO_CALL = 0x00050000 | errno.ENOSYS
_WHOLE = 0xFFFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)

# The refused system calls with their numbers on x86-64/arm64: those that could reach outside
# (sockets, other processes, mounts, programs), those that hold memory outside the limits (a pipe of
# spliced pages, memory files, queues, watches), and large parts of the kernel that calculations do
# not need. A number above the newest is that of a call that the processor does not have.
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NEWEST = 449
"""The newest system call that this list considers, `futex_waitv` of Linux 5.16; programs fall back
where a later one does not exist."""
_CLONE, _CLONE3, PIVOT_ROOT = (56, 220), (435, 435), (155, 41)
_MMAP, _PRCTL = (9, 222), (157, 167)
_TABLE = """
socket 41/198  socketpair 53/199  vmsplice 278/75  splice 275/76  tee 276/77
inotify_add_watch 254/27  io_setup 206/0  landlock_create_ruleset 444/444  sync 162/81
syncfs 306/267  syslog 103/116  execve 59/221  execveat 322/281  ptrace 101/117
process_vm_readv 310/270  process_vm_writev 311/271  pidfd_getfd 438/438  kcmp 312/272
unshare 272/97  setns 308/268  chroot 161/51  pivot_root 155/41  mount 165/40  umount2 166/39
open_tree 428/428  move_mount 429/429  fsopen 430/430  fsconfig 431/431  fsmount 432/432
fspick 433/433  mount_setattr 442/442  name_to_handle_at 303/264  open_by_handle_at 304/265
memfd_create 319/279  memfd_secret 447/447  shmget 29/194  semget 64/190  msgget 68/186
mq_open 240/180  add_key 248/217  request_key 249/218  keyctl 250/219  bpf 321/280
perf_event_open 298/241  userfaultfd 323/282  io_uring_setup 425/425  io_uring_enter 426/426
io_uring_register 427/427  fanotify_init 300/262  personality 135/92  kexec_load 246/104
kexec_file_load 320/294  init_module 175/105  finit_module 313/273  delete_module 176/106
modify_ldt 154/1000
"""
_WORDS = _TABLE.replace("/", " ").split()
DENIED = {
    name: (int(x86), int(arm))
    for name, x86, arm in zip(_WORDS[::3], _WORDS[1::3], _WORDS[2::3], strict=True)
}

CHECKED: dict[str, tuple[tuple[int, int], list[tuple[tuple[int, int, int], ...]]]] = {
    "socket": ((41, 198), [((0, _WHOLE, 2), (1, 15, 1), (2, _WHOLE, p)) for p in (0, 6)]),
    "socketpair": ((53, 199), [((0, _WHOLE, 1), (1, 15, 1), (2, _WHOLE, 0))]),
    "setsockopt": (
        (54, 208),
        [
            ((1, _WHOLE, level), (2, _WHOLE, option))
            for level, options in ((1, (2, 9, 13, 20, 21)), (6, (1, 4, 5, 6, 12, 18)))
            for option in options
        ],
    ),
}
"""System calls of a command that are refused but for these arguments: number, mask and value of
each that is checked. They are TCP over IPv4; a pair of connected streams, since a pair of datagram
sockets could reach a Unix socket in a readable folder; and options that attach no program, load no
module and hold no memory: reuse of addresses, keep-alive, linger, time-outs, no delay.
"""
COMMANDS = {name: n for name, n in DENIED.items() if name not in {"execve", *CHECKED}}
"""What a command may not call at all."""


def deny(
    denied: Mapping[str, tuple[int, int]],
    checked: Mapping[str, tuple[tuple[int, int], Sequence[Any]]] = {},
) -> None:
    """Makes system calls fail with EPERM in this process and its descendants, irrevocably.

    Args:
        denied: Those that always fail.
        checked: Those that fail but for some arguments, as in `CHECKED`.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES or sys.maxsize < 2**32:
        supported = " and ".join(ARCHITECTURES)
        raise OSError(errno.ENOSYS, f"seccomp: the processor is {machine}; expected {supported}")
    column, audit = ARCHITECTURES[machine]
    map_shared, map_anonymous = 1, 0x20
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_GIVE, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if column == 0:  # the x32 numbering of the same calls
        program += [(_AT_LEAST, 0, 1, 0x40000000), (_GIVE, 0, 0, _KILL)]
    program += [(_AT_LEAST, 0, 1, _NEWEST + 1), (_GIVE, 0, 0, _NO_CALL)]
    for numbers in denied.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_GIVE, 0, 0, _REFUSE)]
    for numbers, alternatives in checked.values():
        body = [step for terms in alternatives for step in _allow(terms)]
        body.append((_GIVE, 0, 0, _REFUSE))
        program += [(_EQUAL, 0, len(body), numbers[column]), *body]
    # A mapping of 4 KiB could hold a huge page, or shared memory of which the rest is unmapped.
    program += [(_EQUAL, 0, 4, _MMAP[column]), (_LOAD, 0, 0, 40), (_ANY_BIT, 0, 2, map_anonymous)]
    program += [(_ANY_BIT, 0, 1, map_shared), (_GIVE, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    program += [(_EQUAL, 0, 3, _PRCTL[column]), (_LOAD, 0, 0, 16)]
    program += [(_EQUAL, 0, 1, PR_SET_THP_DISABLE), (_GIVE, 0, 0, _REFUSE)]
    program += [(_LOAD, 0, 0, 0)]
    # ENOSYS makes the C library fall back to clone, whose flags a filter can read.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_GIVE, 0, 0, _NO_CALL)]
    program += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16)]
    program += [(_ANY_BIT, 0, 1, ALL_NAMESPACES), (_GIVE, 0, 0, _REFUSE)]
    program += [(_GIVE, 0, 0, _ALLOW)]
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in program))
    head = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    header = ctypes.create_string_buffer(head)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header))


def _allow(terms: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Returns the steps that allow a call if each of the arguments has its value."""
    steps: list[tuple[int, int, int, int]] = []
    for remaining, (argument, mask, value) in zip(
        range(len(terms) - 1, -1, -1), terms, strict=True
    ):
        test = (_EQUAL, 0, 3 * remaining + 1, value)
        steps += [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask), test]
    return [*steps, (_GIVE, 0, 0, _ALLOW)]


def prctl(option: int, *arguments: int) -> None:
    """Calls `prctl`.

    Raises:
        OSError: It failed.
    """
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    check(f"prctl({option})", _libc.prctl(option, *padded))


def check(name: str, result: int) -> None:
    """Raises the error of a system call that failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
