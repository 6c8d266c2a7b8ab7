"""The system calls that a program in the sandbox may make, and their numbers.

Two groups: ALLOWED is what ordinary Python, numpy and sympy need; SLOT_ONLY is what the slot
needs around a call and what the child gives up before it runs any foreign code. A few calls of
both groups are allowed with certain arguments only: those rules are in `seccomp.py`. What is in
no group is refused.
"""

from __future__ import annotations

# name -> (x86-64, aarch64); None where the architecture has no such call
_X, _A = 0, 1
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # input and output
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "readv": (19, 65),
    "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69),
    "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "close_range": (436, 436),
    "fsync": (74, 82), "fdatasync": (75, 83), "fadvise64": (221, 223), "eventfd2": (290, 19),
    # files
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "readlink": (89, None), "readlinkat": (267, 78), "umask": (95, 166),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "statfs": (137, 43), "fstatfs": (138, 44), "ftruncate": (77, 46),
    "fallocate": (285, 47), "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50),
    # memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226),
    "mremap": (25, 216), "madvise": (28, 233), "msync": (26, 227),
    # waiting
    "select": (23, None), "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73),
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "pause": (34, None),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "sched_yield": (24, 124),
    # time
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "alarm": (37, None),
    "getitimer": (36, 102), "setitimer": (38, 103),
    # signals to itself
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    # the process and its threads
    "exit": (60, 93), "exit_group": (231, 94), "getpid": (39, 172), "getppid": (110, 173),
    "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "getrusage": (98, 165),
    "getpriority": (140, 141), "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278),
    "sched_getaffinity": (204, 123), "sched_getscheduler": (145, 120),
    "sched_getparam": (143, 121), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "getcpu": (309, 168), "futex": (202, 98),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "rseq": (334, 293),
    "set_tid_address": (218, 96), "membarrier": (324, 283), "wait4": (61, 260),
    "waitid": (247, 95),
    # the two ends of a socket pair, which asyncio wakes itself with
    "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209),
}  # fmt: skip

# Landlock has no rule for these: without a root of its own, a program could otherwise change the
# modes and times of every file of the user that runs it.
METADATA: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "truncate": (76, 45),
}  # fmt: skip

# With neither a root of its own nor landlock, nothing may be opened at all.
OPENING: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "creat": (85, None), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "unlink": (87, None),
    "unlinkat": (263, 35), "symlink": (88, None), "symlinkat": (266, 36),
}  # fmt: skip

# Allowed to slot and child, with rules on the arguments.
CHECKED: dict[str, tuple[int | None, int | None]] = {
    "ioctl": (16, 29), "fcntl": (72, 25), "clone": (56, 220), "kill": (62, 129),
    "tgkill": (234, 131), "prctl": (157, 167), "prlimit64": (302, 261),
    "socketpair": (53, 199), "sendto": (44, 206),
}  # fmt: skip

SLOT_ONLY: dict[str, tuple[int | None, int | None]] = {
    "memfd_create": (319, 279), "pidfd_open": (434, 434), "sendmsg": (46, 211),
    "seccomp": (317, 277),
}  # fmt: skip

# Refused as "not implemented", after which libc uses an older call that can be checked.
NOT_IMPLEMENTED: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435), "openat2": (437, 437), "epoll_pwait2": (441, 441),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236), "mbind": (237, 235), "futex_waitv": (449, 449),
    "map_shadow_stack": (453, 453),
}  # fmt: skip
