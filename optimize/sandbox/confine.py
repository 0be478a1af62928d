"""The child's side: a process takes its own rights away, for good.

Three layers, each of the kernel's own: resource limits (hard ones), Landlock (no file is opened for writing, made,
moved or removed outside one folder), and a seccomp filter (no network, no other process, no change of modes, owners
or limits). Nothing of it can be undone from inside. Where the kernel or the system lacks a layer, that is returned, and
the user is told.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from optimize.sandbox.limits import Limits

#: Calls that end with EPERM. What only reads, computes, allocates or starts a thread is left.
_DENIED = """
    socket socketpair connect bind listen accept accept4 sendto sendmsg sendmmsg execve execveat fork vfork ptrace
    process_vm_readv process_vm_writev process_madvise pidfd_open pidfd_getfd pidfd_send_signal kcmp unshare setns
    chroot pivot_root mount umount2 open_tree move_mount fsopen fsconfig fsmount chmod fchmod fchmodat fchmodat2
    chown fchown lchown fchownat utime utimes utimensat futimesat setxattr lsetxattr fsetxattr removexattr
    lremovexattr fremovexattr setxattrat removexattrat setrlimit setpriority sched_setscheduler setuid setgid
    setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset sethostname setdomainname
    settimeofday clock_settime clock_adjtime adjtimex reboot kexec_load kexec_file_load init_module finit_module
    delete_module swapon swapoff acct quotactl bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
    io_uring_register keyctl add_key request_key shmget shmat shmctl semget semop semctl msgget msgsnd msgrcv
    msgctl mq_open mq_unlink fanotify_init inotify_init inotify_init1 name_to_handle_at open_by_handle_at
    personality ioperm iopl modify_ldt vhangup syslog lookup_dcookie nfsservctl
"""
_CLONE_THREAD = 0x00010000
#: Devices that a runtime opens for writing; none of them keeps anything.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
_GPU_DEVICES = ("nvidia*", "nvidia-caps", "dri", "kfd")
#: What this system lacked when this process confined itself, in words.
missing_layers: list[str] = []
_confined = False
_write_protected = False


def is_confined() -> bool:
    """Say whether this process has confined itself."""
    return _confined


def is_write_protected() -> bool:
    """Say whether this process cannot write outside its folder."""
    return _write_protected


def confine_files(folder: Path) -> None:
    """Let this process write in one folder and nowhere else; to be called while it has one thread."""
    global _write_protected
    try:
        import landlock

        rules = landlock.Ruleset(restrict_rules=_writing(landlock.FSAccess))
        rules.allow(str(folder))
        devices = [*map(Path, _DEVICES), *(found for name in _GPU_DEVICES for found in Path("/dev").glob(name))]
        on_device = rules.restrict_rules & landlock.FSAccess.all_file()
        for device in devices:
            if device.exists():
                rules.allow(str(device), rules=rules.restrict_rules if device.is_dir() else on_device)
        rules.apply()
    except Exception as error:  # no package, no kernel support, or rights that this container does not give
        missing_layers.append(f"no protection against writing files ({_reason(error)})")
        return
    _write_protected = True


def confine(limits: Limits) -> list[str]:
    """Take the rest away: network, other processes, memory, time; to be called when the libraries are imported.

    Returns:
        What is missing of this and of `confine_files`, nothing where all of it holds.
    """
    global _confined
    missing_layers.extend([*_limit(limits), *_filter_calls()])
    _confined = True
    return list(missing_layers)


def end_with_parent() -> None:
    """Let the kernel end this process when its parent is gone, killed included (Linux)."""
    import signal

    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _writing(access: type) -> int:
    """Return every right that changes files; reading and running stay free."""
    everything = access.all()  # type: ignore[attr-defined]
    reading = access.EXECUTE | access.READ_FILE | access.READ_DIR  # type: ignore[attr-defined]
    return everything & ~reading


def _limit(limits: Limits) -> list[str]:
    """Set hard limits; what the system already limits harder stays."""
    try:
        import resource
    except ImportError:
        return ["no limits of memory and time (this system has none)"]
    wanted = {resource.RLIMIT_FSIZE: limits.file_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 1024}
    if limits.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = int(limits.cpu_s) + 1
    present = _address_space_bytes()
    if limits.memory_bytes is not None and present is not None:
        wanted[resource.RLIMIT_AS] = present + limits.memory_bytes
    for name, value in wanted.items():
        _, hard = resource.getrlimit(name)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        soft = max(0, allowed - 1) if name == resource.RLIMIT_CPU else allowed  # SIGXCPU first, then SIGKILL
        resource.setrlimit(name, (soft, allowed))
    return [] if present is not None or limits.memory_bytes is None else ["no limit of memory (there is no /proc)"]


def _address_space_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _filter_calls() -> list[str]:
    try:
        import pyseccomp

        rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        rules.set_attr(pyseccomp.Attr.CTL_TSYNC, 1)
        denied = pyseccomp.ERRNO(errno.EPERM)
        for name in _DENIED.split():
            _deny(rules, denied, name)
        _deny_with_arguments(pyseccomp, rules, denied)
        rules.load()
    except Exception as error:  # no package, no library, no kernel support
        return [f"no protection against the network and other processes ({_reason(error)})"]
    return []


def _deny_with_arguments(pyseccomp: object, rules: object, denied: int) -> None:
    """Deny what is harmless in one form: threads stay, processes go; reading limits stays, raising them goes."""
    arg, equal, unequal, masked = (getattr(pyseccomp, name) for name in ("Arg", "EQ", "NE", "MASKED_EQ"))
    _deny(rules, denied, "clone", arg(0, masked, _CLONE_THREAD, 0))
    # The flags of clone3 lie in memory, where no filter looks: the C library goes back to clone.
    _deny(rules, pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # type: ignore[attr-defined]
    _deny(rules, denied, "prlimit64", arg(2, unequal, 0))
    for name in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        if name != "tkill":
            _deny(rules, denied, name, arg(0, unequal, os.getpid()))
    _deny(rules, denied, "tkill")
    for request in (0x5412, 0x541C):  # TIOCSTI and TIOCLINUX type into the user's terminal
        _deny(rules, denied, "ioctl", arg(1, equal, request))


def _deny(rules: object, denied: int, name: str, *arguments: object) -> None:
    """Add one rule; a call that this kind of machine does not have needs none."""
    with contextlib.suppress(OSError, ValueError):
        rules.add_rule(denied, name, *arguments)  # type: ignore[attr-defined]


def _reason(error: Exception) -> str:
    line: Sequence[str] = str(error).strip().splitlines() or [type(error).__name__]
    return line[0][:120]
