"""A command under a filter of system calls that refuses what Docker's default profile refuses.

    python -m tests.containers.confined COMMAND ...

The filter is libseccomp's. A process without capabilities gets EPERM from calls below, and from
new namespaces. ``clone3``, whose flags no filter can read, is unknown, so that C libraries use
``clone``. Docker permits ``ptrace`` and its like since Linux 4.8; here they are refused as before.
"""

import ctypes
import errno
import os
import sys

__all__ = ["confine"]

_REFUSED = """
acct add_key bpf chroot clock_adjtime clock_settime delete_module finit_module fsconfig fsmount
fsopen fspick get_mempolicy init_module io_uring_enter io_uring_register io_uring_setup ioperm
iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie mbind migrate_pages mount mount_setattr
move_mount move_pages name_to_handle_at open_by_handle_at open_tree perf_event_open pidfd_getfd
pivot_root process_madvise process_vm_readv process_vm_writev ptrace quotactl reboot request_key
set_mempolicy set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon
syslog umount2 unshare userfaultfd vhangup
"""
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SCMP_ACT_
_MASKED_EQUAL = 7  # SCMP_CMP_MASKED_EQ
_NEW_NAMESPACES = [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]  # CLONE_NEW...


class _Comparison(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


def confine() -> None:
    """Put this process, and what it will start, under the filter. Raises OSError."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ALLOW))

    def refuse(name: str, error: int, *comparisons: _Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        rows = (_Comparison * len(comparisons))(*comparisons)
        code = library.seccomp_rule_add_array(
            context, ctypes.c_uint32(_ERRNO | error), number, len(comparisons), rows
        )
        if code:
            raise OSError(-code, f"seccomp_rule_add_array: {name}")

    for name in _REFUSED.split():
        if library.seccomp_syscall_resolve_name(name.encode()) != -1:  # older libraries lack some
            refuse(name, errno.EPERM)
    for flag in _NEW_NAMESPACES:
        refuse("clone", errno.EPERM, _Comparison(0, _MASKED_EQUAL, flag, flag))
    refuse("clone3", errno.ENOSYS)
    if code := library.seccomp_load(context):
        raise OSError(-code, "seccomp_load")


if __name__ == "__main__":
    confine()
    os.execvp(sys.argv[1], sys.argv[1:])
