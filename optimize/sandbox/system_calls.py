"""The calls of the kernel that a confined process is denied, for all of its threads."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket

from optimize.errors import first_line

#: Calls that end with EPERM. What only reads, computes, allocates or starts a thread is left.
_DENIED = """
    socket socketpair connect bind listen accept accept4 sendto sendmsg sendmmsg execve execveat fork vfork ptrace
    process_vm_readv process_vm_writev process_madvise pidfd_open pidfd_getfd pidfd_send_signal kcmp unshare setns
    chroot pivot_root mount umount2 mount_setattr open_tree move_mount fsopen fspick fsconfig fsmount chmod fchmod
    fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat setxattr lsetxattr fsetxattr
    removexattr lremovexattr fremovexattr setrlimit setpriority sched_setscheduler sched_setattr sched_setparam
    ioprio_set mknod mknodat memfd_create memfd_secret setuid setgid setreuid setregid setresuid setresgid setgroups
    setfsuid setfsgid capset sethostname setdomainname settimeofday clock_settime clock_adjtime adjtimex reboot
    kexec_load kexec_file_load init_module finit_module delete_module swapon swapoff acct quotactl quotactl_fd bpf
    perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key shmget
    shmat shmctl semget semop semctl msgget msgsnd msgrcv msgctl mq_open mq_unlink fanotify_init inotify_init
    inotify_init1 name_to_handle_at open_by_handle_at personality ioperm iopl modify_ldt vhangup syslog
    lookup_dcookie nfsservctl setsid setpgid
"""
#: Those among them that compilers and copies ask for: where they may run they are told that it is done, and it is not.
_PRETENDED = frozenset(["chmod", "fchmod", "fchmodat", "fchmodat2"])
#: Those among them that whoever starts processes needs, pipes to them and limits for them.
_STARTING = frozenset(["socketpair", "execve", "execveat", "fork", "vfork", "setsid", "setpgid", "setrlimit"])
#: Those among them that cuInit of NVIDIA's driver fails without: it listens at a name of its own, which nobody can be
#: answered at (accept, connect and sending stay denied), and older ones (570) keep memory behind a descriptor.
_DRIVING = frozenset(["socket", "bind", "listen", "memfd_create"])
#: The same by number, as all machines have numbered them since 2019: libraries do not know the names of new calls.
#: fchmodat2, lsm_set_self_attr, and all from setxattrat on, those that nobody has thought of yet included.
_NUMBERS = (452, 460, *range(463, 700))
_CLONE_THREAD = 0x00010000
#: Of clone, what makes a namespace: of mounts, control groups, names, messages, users, processes, networks, time.
_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80)
_LOW_32 = 0xFFFFFFFF
#: Commands of fcntl that let the kernel send signals to others: F_SETOWN, F_SETSIG, F_SETOWN_EX.
_SIGNALLING = (8, 10, 15)
#: Requests of ioctl that change the flags of a file: FS_IOC_SETFLAGS in both sizes, FS_IOC_FSSETXATTR. The kernel looks
#: at 32 bits of them. And those of sockets that let it send signals to others, as F_SETOWN: FIOSETOWN, SIOCSPGRP.
_REQUESTS = (0x40086602, 0x40046602, 0x401C5820, 0x8901, 0x8902)
#: Requests about a terminal, of every size and direction, but for those that ask what it is (TCGETS, TIOCGWINSZ) and
#: what is about any descriptor (FIONREAD, FIONBIO, FIONCLEX, FIOCLEX).
_TERMINAL = tuple(0x5400 + number for number in range(256) if number not in (0x01, 0x13, 0x1B, 0x21, 0x50, 0x51))
_LOW_16 = 0xFFFF
_PR_SET_PDEATHSIG = 1


def filter_calls(*, starts_processes: bool = False, uses_gpu: bool = False) -> list[str]:
    """Deny them for good; return what is missing for that, nothing where it holds.

    Args:
        starts_processes: Let this process start others, send them signals, and bind them to processors.
        uses_gpu: Let it do what NVIDIA's driver cannot do without.
    """
    try:
        import pyseccomp

        rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        rules.set_attr(pyseccomp.Attr.CTL_TSYNC, 1)
        denied = pyseccomp.ERRNO(errno.EPERM)
        for call in (*_DENIED.split(), *_NUMBERS):
            if uses_gpu and call in _DRIVING:
                continue
            if not starts_processes:
                _deny(rules, denied, call)
            elif call not in _STARTING:
                _deny(rules, pyseccomp.ERRNO(0) if call in _PRETENDED else denied, call)
        if uses_gpu:
            _deny(rules, denied, "socket", pyseccomp.Arg(0, pyseccomp.NE, socket.AF_UNIX))
        _deny_with_arguments(pyseccomp, rules, denied)
        (_guard_parent if starts_processes else _deny_processes)(pyseccomp, rules, denied)
        rules.load()
    except Exception as error:  # no package, no library, no kernel support
        return [f"no protection against the network and other processes ({first_line(error)[:120]})"]
    return []


def _deny_with_arguments(pyseccomp: object, rules: object, denied: int) -> None:
    """Deny what is harmless in one form."""
    arg, unequal, masked = (getattr(pyseccomp, name) for name in ("Arg", "NE", "MASKED_EQ"))
    _deny(rules, denied, "prlimit64", arg(0, unequal, 0), arg(2, unequal, 0))
    # The flags of clone3 lie in memory, where no filter looks: the C library goes back to clone.
    _deny(rules, pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # type: ignore[attr-defined]
    for flag in _NAMESPACES:
        _deny(rules, denied, "clone", arg(0, masked, flag, flag))
    for command in _SIGNALLING:
        _deny(rules, denied, "fcntl", arg(1, masked, _LOW_32, command))
    for request in _REQUESTS:
        _deny(rules, denied, "ioctl", arg(1, masked, _LOW_32, request))
    for request in _TERMINAL:
        _deny(rules, denied, "ioctl", arg(1, masked, _LOW_16, request))


def _deny_processes(pyseccomp: object, rules: object, denied: int) -> None:
    """Deny what is about other processes: threads stay; and what sets limits, reading them stays."""
    arg, unequal, masked = (getattr(pyseccomp, name) for name in ("Arg", "NE", "MASKED_EQ"))
    _deny(rules, denied, "prlimit64", arg(2, unequal, 0))
    _deny(rules, denied, "clone", arg(0, masked, _CLONE_THREAD, 0))
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        _deny(rules, denied, name, arg(0, unequal, os.getpid()))
    _deny(rules, denied, "tkill")
    _deny(rules, denied, "sched_setaffinity", arg(0, unequal, 0))
    _deny(rules, denied, "prctl", arg(0, masked, _LOW_32, _PR_SET_PDEATHSIG))


def _guard_parent(pyseccomp: object, rules: object, denied: int) -> None:
    """Deny signals to the parent, also through its group and everybody's, and to outlive it."""
    arg, unequal, masked = (getattr(pyseccomp, name) for name in ("Arg", "NE", "MASKED_EQ"))
    for number in (os.getppid(), 0, -1, -os.getpgrp()):
        for name in ("kill", "tgkill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
            _deny(rules, denied, name, arg(0, masked, _LOW_32, number & _LOW_32))
    signals = arg(1, unequal, signal.SIGKILL)
    _deny(rules, denied, "prctl", arg(0, masked, _LOW_32, _PR_SET_PDEATHSIG), signals)


def _deny(rules: object, denied: int, call: str | int, *arguments: object) -> None:
    """Add one rule; a call that this kind of machine does not have needs none."""
    with contextlib.suppress(OSError, ValueError):
        rules.add_rule(denied, call, *arguments)  # type: ignore[attr-defined]
