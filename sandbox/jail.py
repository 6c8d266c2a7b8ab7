"""The walls around one slot: namespaces, a root of read-only binds, an ordinary uid, no rights.

`enter_namespaces` runs in a short-lived process between zygote and slot, `lock_down` in the slot
itself. Each step is tried and its outcome is recorded in `Layers`; a step that the kernel
refuses leaves the later ones to hold what they can. What must hold without exception (no new
privileges, resource limits) raises.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
from dataclasses import asdict, dataclass, field

from sandbox import kernel, landlock
from sandbox.result import SandboxLimits

SCRATCH = "/tmp"
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/boot", "/var", "/run", "/sys")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM_PATHS = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)
FIRST_OWN_UID = 1_700_000_000
_SPACES = {
    "mount": kernel.CLONE_NEWNS,
    "pid": kernel.CLONE_NEWPID,
    "net": kernel.CLONE_NEWNET,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
    "cgroup": kernel.CLONE_NEWCGROUP,
}
LAYERS = (
    "user", *_SPACES, "root", "scratch", "uid", "capabilities", "landlock", "seccomp", "limits"
)  # fmt: skip


@dataclass(slots=True)
class Layers:
    """Which walls stand: layer -> empty text where it holds, else the reason why not."""

    missing: dict[str, str] = field(default_factory=dict)
    landlock_abi: int = 0

    def lacks(self, layer: str) -> bool:
        """Whether `layer` does not hold."""
        return layer in self.missing

    def as_dict(self) -> dict[str, object]:
        """Return the record as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class JailPlan:
    """What the walls are built from, collected by the zygote.

    Attributes:
        code_paths: folders that the interpreter imports from.
        disabled: layers not to use, for tests and measurements.
        own_number: no other slot of this machine has it; root gives its slots uids by it.
        base_bytes: address space of the interpreter before any foreign code.
    """

    code_paths: tuple[str, ...]
    disabled: frozenset[str]
    own_number: int
    base_bytes: int

    def readable(self) -> list[str]:
        """Return every host path that the inside may read."""
        return list(dict.fromkeys([*_SYSTEM_PATHS, *self.code_paths]))


def enter_namespaces(plan: JailPlan, layers: Layers) -> None:
    """Leave the host's namespaces; the pid namespace takes effect for the next child."""
    os.setsid()
    is_root = os.geteuid() == 0
    if not is_root:
        _try(plan, layers, "user", _new_user_namespace)
    for name, flag in _SPACES.items():
        _try(plan, layers, name, lambda flag=flag: kernel.unshare(flag))


def lock_down(plan: JailPlan, layers: Layers, limits: SandboxLimits) -> None:
    """Build the walls from within; afterwards this process holds no rights to lose."""
    is_root = os.geteuid() == 0
    own_proc = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY) if is_root else -1
    if layers.lacks("mount"):
        for layer in ("root", "scratch"):
            layers.missing[layer] = "needs the mount namespace"
    else:
        _try(plan, layers, "root", lambda: _change_root(plan, limits))
        if layers.lacks("root"):
            layers.missing["scratch"] = "needs its own root"
    if not layers.lacks("uts"):
        _try(plan, layers, "uts", lambda: socket.sethostname("sandbox"))
    if is_root:
        _try(plan, layers, "uid", lambda: _become_ordinary(plan, layers))
        _try(plan, layers, "user", lambda: _new_user_namespace(own_proc))
        os.close(own_proc)
    if not layers.lacks("capabilities"):
        _try(plan, layers, "capabilities", kernel.drop_capabilities)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    _set_limits(layers, limits, plan.base_bytes)
    _try(plan, layers, "landlock", lambda: _restrict_paths(plan, layers))
    if layers.lacks("landlock"):
        kernel.drop_capabilities()
    os.chdir(SCRATCH if not layers.lacks("scratch") else "/")


def _try(plan: JailPlan, layers: Layers, layer: str, step) -> None:
    if layer in plan.disabled:
        layers.missing[layer] = "switched off"
        return
    try:
        step()
    except OSError as error:
        layers.missing[layer] = str(error)


def _new_user_namespace(own_proc: int = -1) -> None:
    """Enter a user namespace in which only the own uid and gid exist."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
    kernel.unshare(kernel.CLONE_NEWUSER)
    place = own_proc if own_proc >= 0 else os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    lines = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    for name, line in lines.items():
        where = os.open(name, os.O_WRONLY, dir_fd=place)
        os.write(where, line.encode())
        os.close(where)
    if own_proc < 0:
        os.close(place)


def _become_ordinary(plan: JailPlan, layers: Layers) -> None:
    """Give up being root.

    Each slot takes a uid of its own, so that without namespaces its programs still share no
    process, thread count or file with anybody.
    """
    uid = FIRST_OWN_UID + plan.own_number
    must_keep = _must_keep_reading(plan, layers)
    if must_keep:
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if must_keep:
        kernel.drop_capabilities(kernel.CAP_DAC_READ_SEARCH)
        layers.missing["capabilities"] = (
            "the interpreter lies in a folder closed to ordinary users: the right to read any "
            "file is kept, and landlock confines it to the interpreter"
        )


def _must_keep_reading(plan: JailPlan, layers: Layers) -> bool:
    """Whether an ordinary user could not read the interpreter, and landlock can confine root."""
    if not layers.lacks("root") or all(map(_is_open_to_all, plan.code_paths)):
        return False
    return landlock.abi() >= 1 and "landlock" not in plan.disabled


def _is_open_to_all(path: str) -> bool:
    while path != "/":
        if os.path.isdir(path) and not os.stat(path).st_mode & stat.S_IXOTH:
            return False
        path = os.path.dirname(path)
    return True


def _change_root(plan: JailPlan, limits: SandboxLimits) -> None:
    """Move into an empty tmpfs with read-only binds and a small writable scratch folder."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = [path for path in plan.readable() if os.path.lexists(path)]
    new_root = next(
        place
        for place in _MOUNT_POINTS
        if os.path.isdir(place) and not any(f"{s}/".startswith(f"{place}/") for s in sources)
    )
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", new_root, "tmpfs", flags, "size=1m,nr_inodes=512,mode=0755")
    scratch = new_root + SCRATCH
    os.mkdir(scratch)
    options = f"size={limits.scratch_mb}m,nr_inodes=1024,mode=1777"
    no_exec = flags | kernel.MS_NOEXEC
    kernel.mount("tmpfs", scratch, "tmpfs", no_exec, options)
    read_only = _reserve(scratch, sources)
    for source in (*_DEVICES, *sources):
        _bind(source, new_root + source)
    for place in (*read_only, new_root):
        kernel.mount(None, place, None, kernel.MS_REMOUNT | kernel.MS_RDONLY | flags)
    os.chdir(new_root)
    kernel.pivot_root_here()


def _reserve(scratch: str, sources: list[str]) -> list[str]:
    """Cover folders of the scratch that lead to binds, so that programs cannot write there."""
    names = {s.split("/")[2] for s in sources if s.startswith(SCRATCH + "/")}
    places = [f"{scratch}/{name}" for name in sorted(names)]
    for place in places:
        os.mkdir(place)
        kernel.mount("tmpfs", place, "tmpfs", kernel.MS_NOSUID, "size=1m,nr_inodes=512,mode=0755")
    return places


def _bind(source: str, target: str) -> None:
    """Show the host's `source` read-only at `target`; symbolic links are repeated as such."""
    if os.path.lexists(target):  # inside a folder that is already bound
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    if source not in _DEVICES:
        kernel.make_read_only(target)


def _set_limits(layers: Layers, limits: SandboxLimits, base_bytes: int) -> None:
    """Set the limits that hold for slot and child alike; CPU time is the child's own."""
    values = {
        resource.RLIMIT_AS: base_bytes + (limits.memory_mb << 20),
        resource.RLIMIT_FSIZE: limits.output_kill_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: 8 << 20,
    }
    if not layers.lacks("user") or not layers.lacks("uid"):
        # counts this slot's uid alone: slot, template, child and its threads
        values[resource.RLIMIT_NPROC] = limits.threads + 3
    else:
        # counts all that the user runs, which goes up and down: a wide margin, so that honest
        # programs do not fail at random
        values[resource.RLIMIT_NPROC] = _tasks_of_user() + 8 * limits.threads
    for which, value in values.items():
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _restrict_paths(plan: JailPlan, layers: Layers) -> None:
    has_own_root = not layers.lacks("root")
    writable = [SCRATCH] if has_own_root else []
    readable = ["/"] if has_own_root else plan.readable()
    devices = [d for d in _DEVICES if os.path.exists(d)]
    layers.landlock_abi = landlock.restrict(readable, [*writable, *devices])


def _tasks_of_user() -> int:
    """Return how many threads this user runs on the host."""
    uid, total = os.geteuid(), 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it ended meanwhile
            continue
    return total
