"""Candidates that try to get out, as C++ in one library: each attempt fails, costs its own verdict,
and the next candidate is verified.

An attack returns the right answer only if it failed, so `ok` shows that it was contained, and that
the one before did no harm; what it managed also goes to its log. Twins show that the same code
succeeds where it may, so that each test can fail.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pydantic
import pytest

from kernels_eval.config import MEMORY_RETURN_S, SOON_S
from kernels_eval.errors import GpuLostError
from kernels_eval.judge import prepare as preparation
from kernels_eval.protocol import CheckHealth
from kernels_eval.records import Reason
from kernels_eval.sandbox import landlock, layers, seccomp
from kernels_eval.sandbox.child import ChildFailure
from kernels_eval.sandbox.health import (
    DeviceHealth,
    HealthReport,
    check,
    check_health,
)
from kernels_eval.sandbox.trees import disk_usage
from kernels_eval.source.screening import Screening
from tests.support import kernels
from tests.support.kernels import (
    AFFINE,
    OWN_TMP,
    QUICK,
    UNTIMED,
    assert_reason,
    load_inline,
    module,
)
from tests.support.waiting import until

LIMITS = QUICK.limits.model_copy(update={"memory_gb": 0.75, "file_mb": 4, "scratch_mb": 16})
SECRET = "a-secret-in-the-parents-environment-51c8"

# An attack gets numbers or paths, with colons between; `gained` is true where it got any of them.
SOURCE = r"""
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sstream>
#include <string>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

static torch::Tensor answer(torch::Tensor x, bool gained, const char* what) {
  printf("%s: %s (errno %d)\n", what, gained ? "GAINED" : "refused", errno);
  fflush(stdout);
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
      y.data_ptr<float>()[i] = x.data_ptr<float>()[i] * 2.0f + (gained ? 2.0f : 1.0f);
  return y;
}
static bool holds(const std::string& path, const std::string& text) {
  FILE* file = fopen(path.c_str(), "rb");
  if (!file) return false;
  std::string all(1 << 20, '\0');
  all.resize(fread(&all[0], 1, all.size(), file));
  fclose(file);
  return text.empty() ? !all.empty() : all.find(text) != std::string::npos;
}
static std::vector<std::string> parts(const std::string& text) {
  std::vector<std::string> found;
  std::stringstream all(text);
  for (std::string part; std::getline(all, part, ':');) found.push_back(part);
  return found;
}
torch::Tensor honest(torch::Tensor x) { errno = 0; return answer(x, false, "honest"); }
torch::Tensor reads(torch::Tensor x, std::string paths) {
  std::string got;
  for (auto& path : parts(paths)) if (holds(path, "")) got += " " + path;
  return answer(x, !got.empty(), ("read" + got).c_str());
}
torch::Tensor lists(torch::Tensor x, std::string paths) {
  std::string got;
  for (auto& path : parts(paths)) {
    DIR* directory = opendir(path.c_str());
    if (directory && readdir(directory)) got += " " + path;
    if (directory) closedir(directory);
  }
  return answer(x, !got.empty(), ("list" + got).c_str());
}
torch::Tensor reads_environments(torch::Tensor x, std::string secret, std::string pids) {
  bool gained = false;
  for (int pid = 1; pid < 256; ++pid)
      gained = gained || holds("/proc/" + std::to_string(pid) + "/environ", secret);
  for (auto& pid : parts(pids)) gained = gained || holds("/proc/" + pid + "/environ", secret);
  return answer(x, gained, "environment");
}
torch::Tensor writes(torch::Tensor x, std::string paths) {
  std::string got;
  for (auto& path : parts(paths)) {
    int made = open(path.c_str(), O_WRONLY | O_CREAT, 0644);
    bool gained = made >= 0 && write(made, "x", 1) == 1;
    if (made >= 0) close(made);
    gained = gained || mkdir((path + ".d").c_str(), 0755) == 0
        || symlink("/", (path + ".s").c_str()) == 0;
    if (gained) got += " " + path;
  }
  return answer(x, !got.empty(), ("write" + got).c_str());
}
torch::Tensor connects(torch::Tensor x, int64_t port) {
  int s = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return answer(x, s >= 0 && connect(s, (struct sockaddr*)&to, sizeof to) == 0, "connect");
}
torch::Tensor connects_unix(torch::Tensor x, std::string name, bool abstract) {
  int s = socket(AF_UNIX, SOCK_STREAM, 0);
  struct sockaddr_un to = {};
  to.sun_family = AF_UNIX;
  memcpy(to.sun_path + (abstract ? 1 : 0), name.data(), name.size());
  socklen_t size = offsetof(struct sockaddr_un, sun_path) + name.size() + 1;
  return answer(x, s >= 0 && connect(s, (struct sockaddr*)&to, size) == 0, "connect");
}
torch::Tensor forks(torch::Tensor x) {
  int made = 0;
  for (int i = 0; i < 4000; ++i) {
    pid_t pid = fork();
    if (pid == 0) { pause(); _exit(0); }
    if (pid > 0) ++made;
  }
  pid_t other = vfork();
  if (other == 0) _exit(0);
  execl("/bin/true", "true", (char*)nullptr);
  return answer(x, made > 0 || other > 0, "fork");
}
torch::Tensor threads(torch::Tensor x) {
  int sum = 0;
  std::vector<std::thread> all;
  for (int i = 0; i < 8; ++i)
      all.emplace_back([&sum, i] { __atomic_add_fetch(&sum, i, __ATOMIC_SEQ_CST); });
  for (auto& one : all) one.join();
  return answer(x, sum != 28, "threads");
}
torch::Tensor schedules(torch::Tensor x) {
  cpu_set_t before, first, after;
  sched_getaffinity(0, sizeof before, &before);
  CPU_ZERO(&first);
  for (int core = 0; CPU_COUNT(&first) == 0; ++core)
      if (CPU_ISSET(core, &before)) CPU_SET(core, &first);
  bool placed = sched_setaffinity(0, sizeof first, &first) == 0
      && setpriority(PRIO_PROCESS, 0, 7) == 0;
  sched_getaffinity(0, sizeof after, &after);
  // as libgomp starts its threads where it is told places
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setaffinity_np(&attributes, sizeof first, &first);
  pthread_t thread;
  int failed = pthread_create(&thread, &attributes, [](void* y) { return y; }, &first);
  if (!failed) pthread_join(thread, nullptr);
  bool gained = !CPU_EQUAL(&before, &after) || getpriority(PRIO_PROCESS, 0) == 7;
  return answer(x, gained || !placed || failed, "schedule");
}
torch::Tensor takes_memory(torch::Tensor x) {
  for (int64_t taken = 0; taken < (4LL << 30); taken += 64 << 20) {
    char* block = (char*)malloc(64 << 20);
    if (!block) break;
    for (int64_t i = 0; i < (64 << 20); i += 4096) block[i] = 1;
  }
  for (;;) pause();
}
torch::Tensor prints(torch::Tensor x) {
  std::string line(1 << 20, 'x');
  int64_t printed = 0;
  for (int i = 0; i < 10240; ++i)
      printed += std::max<ssize_t>(0, write(1, line.data(), line.size()));
  return answer(x, printed > (64 << 20), "print");
}
torch::Tensor fills_the_disk(torch::Tensor x) {
  std::string block(1 << 20, 'x');
  int64_t written = 0;
  for (int i = 0; i < 200; ++i) {
    int file = open(("fill" + std::to_string(i)).c_str(), O_WRONLY | O_CREAT, 0644);
    for (int j = 0; file >= 0 && j < 5; ++j)
        written += std::max<ssize_t>(0, write(file, block.data(), block.size()));
    if (file >= 0) close(file);
  }
  return answer(x, written > (16 << 20) || written == 0, "disk");
}
torch::Tensor opens_many(torch::Tensor x) {
  int opened = 0;
  for (int i = 0; i < 100000; ++i) opened += dup(0) >= 0;
  return answer(x, opened > 4096, "descriptors");
}
torch::Tensor spins(torch::Tensor x) {
  volatile bool on = true;
  while (on) {}
  return x;
}
torch::Tensor kills_its_parent(torch::Tensor x, int64_t pid) {
  bool gained = kill(getppid(), SIGKILL) == 0;
  return answer(x, kill((pid_t)pid, 0) == 0 || gained, "kill");
}
torch::Tensor kills_everything(torch::Tensor x) {
  // Alone in its PID namespace it is process 1 and -1 reaches nobody else. Anywhere else this test
  // must not be made.
  if (getpid() != 1) return answer(x, true, "not alone");
  return answer(x, kill(-1, SIGKILL) == 0, "kill all");
}
torch::Tensor traces(torch::Tensor x, int64_t pid) {
  bool gained = ptrace(PTRACE_ATTACH, (pid_t)pid, 0, 0) == 0
      || ptrace(PTRACE_SEIZE, getppid(), 0, 0) == 0;
  char here[16];
  struct iovec local = {here, sizeof here}, remote = {(void*)here, sizeof here};
  gained = gained || process_vm_readv((pid_t)pid, &local, 1, &remote, 1, 0) > 0;
  // allowed anywhere: only the filter refuses this one
  gained = gained || process_vm_readv(getpid(), &local, 1, &remote, 1, 0) > 0;
  return answer(x, gained, "trace");
}
torch::Tensor calls(torch::Tensor x, std::string numbers) {
  bool gained = false;
  for (auto& number : parts(numbers)) {
    errno = 0;
    bool done = syscall(std::stol(number), 0, 0, 0, 0, 0, 0) >= 0;
    printf("system call %s: errno %d\n", number.c_str(), errno);
    gained = gained || done || (errno != EPERM && errno != ENOSYS);
  }
  return answer(x, gained, "system calls");
}
torch::Tensor leaves(torch::Tensor x) {
  printf("{\"status\": \"correct\", \"reason\": \"ok\", \"timing\": {\"speedup\": 1000.0}}\n");
  fflush(stdout);
  _exit(0);
  return x;
}
"""


class Verifier(kernels.Verifier):
    def __init__(self, run_s=120):
        limits = LIMITS.model_copy(update={"run_s": run_s})
        super().__init__(UNTIMED.model_copy(update={"limits": limits}).screened())
        self.made = []

    def __call__(self, forward, before=""):
        code = module(forward, before=before, extension=load_inline(SOURCE, name="escapes"))
        verdict = super().__call__(AFFINE, code)
        self.made.append(verdict)
        return verdict

    def contained(self, function, *arguments, reason="ok"):
        verdict = self(f"return ext.{function}({', '.join(['x', *map(repr, arguments)])})")
        assert_reason(verdict, reason, timed=False)
        return verdict

    def attack(self, function, *arguments, reason="ok"):
        """The verdict of one attack; and that of an honest candidate after it, on the same
        Runner."""
        verdict = self.contained(function, *arguments, reason=reason)
        assert_reason(self("return ext.honest(x)"), "ok", timed=False)
        return verdict


@pytest.fixture(scope="module")
def verify():
    """A verifier whose screening of native sources is blind: what it would reject by name must be
    harmless without it, too."""
    os.environ["CONCUR_TEST_SECRET"] = SECRET
    with pytest.MonkeyPatch.context() as patch, (made := Verifier()).evaluator:
        patch.setattr(preparation, "screen_native", lambda text: Screening())
        yield made
    del os.environ["CONCUR_TEST_SECRET"]


def paths(*given):
    return ":".join(map(str, given))


def needs(*names):
    here = layers.probe()
    absent = [
        name
        for name in names
        if name not in here and not any(layer.startswith(f"{name}:") for layer in here)
    ]
    if absent:
        pytest.skip(f"not in force here: {', '.join(absent)}")


# -- files -----------------------------------------------------------------------------------------


def test_files_of_the_system_and_of_users_cannot_be_read(verify, tmp_path):
    needs("landlock")
    private = tmp_path / "private"
    private.write_text("what a user keeps")
    private.chmod(0o666)
    own = (private, Path(__file__).resolve())
    verify.contained("reads", paths("/etc/passwd", *own, "/proc/self/root/etc/passwd"))
    cache = verify.runner.builder.tools.cache
    verify.contained("lists", paths("/", "/etc", "/var/tmp", Path.home(), tmp_path, cache))


def test_the_same_code_reads_what_it_may(verify):
    for path in ("/proc/self/status", "../candidate.py"):
        assert verify(f"return ext.reads(x, {path!r})").reason == "wrong_output", path
    assert verify("return ext.lists(x, '.')").reason == "wrong_output"


def test_nothing_is_written_outside_the_scratch(verify, tmp_path):
    needs("landlock")
    tmp_path.chmod(0o777)
    here = Path(__file__).parent / "left"
    aims = (tmp_path / "left", "/var/tmp/concur-left", "/dev/shm/concur-left", "../left", here)
    verify.contained("writes", paths(*aims))
    assert not any(map(os.path.lexists, aims)) and not list(tmp_path.iterdir())
    assert verify("return ext.writes(x, 'left')").reason == "wrong_output", (
        "in its own scratch it may"
    )


@pytest.mark.skipif(not OWN_TMP, reason="a child shares /tmp with this checkout or its builds")
def test_tmp_is_the_childs_own_and_empty(verify):
    needs("landlock", "tmpfs_scratch")
    secret = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        assert verify(f"return ext.lists(x, {str(secret)!r})").reason == "ok", "it is not there"
        assert verify("return ext.writes(x, '/tmp/concur-left')").reason == "wrong_output"
        assert not os.path.lexists("/tmp/concur-left"), "what it writes there stays with it"
        assert verify("return ext.reads(x, '/tmp/concur-left')").reason == "ok", "not even to read"
    finally:
        secret.rmdir()


def test_environments_of_other_processes_cannot_be_read(verify):
    needs("namespace:pid")
    with open(f"/proc/{os.getpid()}/environ", "rb") as handle:
        here = b"PATH=" in handle.read()
    assert here, "this is where a secret would be"
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pids = paths(holder.pid, os.getpid(), verify.runner.server.process.pid)
        verify.contained("reads_environments", SECRET, pids)
        own = verify("return ext.reads_environments(x, 'OMP_NUM_THREADS', '1')")
        assert own.reason == "wrong_output", "its own it can read"
    finally:
        holder.communicate(b"\n")


# -- the network -----------------------------------------------------------------------------------


@contextlib.contextmanager
def listener(family, address):
    """A server that notes who connects."""
    came = []
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen()

        def accept():
            while True:
                try:
                    came.append(server.accept())
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server, came
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_servers_on_this_machine_cannot_be_reached(verify, tmp_path):
    with listener(socket.AF_INET, ("127.0.0.1", 0)) as (server, came):
        verify.contained("connects", server.getsockname()[1])
        assert not came
        socket.create_connection(server.getsockname()).close()
        until(lambda: len(came) == 1, "the server does notice who connects")
    name = f"concur-test-abstract-{os.getpid()}"
    with listener(socket.AF_UNIX, b"\0" + name.encode()) as (_, came):
        verify.contained("connects_unix", name, True)
        assert not came
    with listener(socket.AF_UNIX, str(tmp_path / "s")) as (_, came):
        verify.contained("connects_unix", str(tmp_path / "s"), False)
        assert not came


# -- processes -------------------------------------------------------------------------------------


def test_no_process_is_started_and_threads_work(verify):
    needs("seccomp")
    verify.contained("forks")
    assert verify("return ext.threads(x)").reason == "ok"


def test_threads_run_where_the_judge_says_and_may_ask_for_other_cores(verify):
    needs("seccomp")
    verify.contained("schedules")


def test_no_other_process_is_killed_or_traced(verify):
    needs("namespace:pid", "seccomp")
    parent = verify.runner.server.process.pid
    verify.contained("kills_its_parent", parent)
    verify.contained("kills_everything")
    verify.contained("traces", os.getpid())
    assert verify.runner.server.process.pid == parent and verify.runner.server.alive, (
        "the fork server is the same one as before"
    )


UNNEEDED = """bpf perf_event_open userfaultfd io_uring_setup unshare keyctl pidfd_getfd mount
memfd_secret shmget msgget semget mq_open"""


def test_system_calls_that_no_kernel_needs_are_refused(verify):
    needs("seccomp")
    numbers = [seccomp.NUMBERS[name][seccomp.MACHINE] for name in UNNEEDED.split()]
    verify.contained("calls", paths(*numbers))
    call = f"ext.calls(x, {paths(*numbers)!r})"
    # the candidate then fails, because only failures keep what they printed
    log = verify(f"{call}\nraise ValueError('show the log')").log_tail
    assert all(f"system call {number}: errno 1\n" in log for number in numbers), log


# -- bombs -----------------------------------------------------------------------------------------


def test_a_memory_bomb(verify):
    assert "0.75 GB" in verify.attack("takes_memory", reason="out_of_memory").detail


def test_a_disk_bomb_and_endless_output(verify):
    verify.contained("fills_the_disk")
    verify.contained("prints")
    assert disk_usage(verify.runner.server.base, 100_000)[0] < 512 << 20
    verify.runner.warm_pool.wait_closed()
    assert not list(verify.runner.server.base.glob("candidate-*")), "nothing is left of them"


def test_a_descriptor_bomb(verify):
    """The process is left without a descriptor for its own answer: its own loss."""
    assert "Too many open files" in verify.attack("opens_many", reason="exception").detail


def test_loops_without_end(verify):
    with (impatient := Verifier(run_s=4)).evaluator:
        assert impatient.contained("spins", reason="run").status.value == "timeout"
    assert verify("return ext.honest(x)").reason == "ok"


def test_a_forged_verdict_and_an_exit(verify):
    verdict = verify.attack("leaves", reason="exited_early")
    assert '"speedup": 1000.0' in verdict.log_tail and verdict.timing is None


def test_every_verdict_says_what_was_in_force(verify):
    here = tuple(layers.probe())
    verify("return ext.honest(x)")
    assert verify.made and all(verdict.isolation == here for verdict in verify.made)


# -- layers, one by one, as root and as an ordinary user -------------------------------------------

ESCAPES = """
import json, os, socket, sys
from kernels_eval.sandbox import confinement, layers, namespaces

def attempt(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"

def inner(found, scratch):
    limits = {"threads": 64, "processes": 8, "scratch_mb": 4, "file_mb": 8, "cpu_s": 60}
    confinement.confine({"spawn": "candidate", "limits": limits, "scratch": scratch}, found, \
confinement.readable(), {0, 1, 2})
    seen = {
        "read": attempt(lambda: open("/etc/passwd").close()), "list": attempt(lambda: \
os.listdir(os.path.dirname(scratch))),
        "scratch": attempt(lambda: open("made", "w").close()), "socket": attempt(lambda: \
socket.socket(socket.AF_INET)),
        "fork": attempt(lambda: os.fork() or os._exit(0)), "unshare": attempt(lambda: \
namespaces.enter(0x10000000)),
        "signal": attempt(lambda: os.kill(int(sys.argv[3]), 0)),
        "parent": attempt(lambda: open(f"/proc/{sys.argv[3]}/environ", "rb").read(1)),
    }
    print(json.dumps({"layers": found, "seen": seen}), flush=True)

without, scratch = [name for name in sys.argv[1].split(",") if name], sys.argv[2]
found = layers.probe(without)
os.makedirs(f"{scratch}/work")
confinement.enter_namespaces(found)
if os.fork() == 0:
    try:
        inner(found, scratch)
    finally:
        os._exit(0)
os.wait()
"""
SYSTEM_PYTHON = "/usr/bin/python3"
NO_NAMESPACES = ("namespace:user", "namespace:pid", "namespace:net", "namespace:ipc")
COMBINATIONS = {
    "all": (),
    "no_namespaces": NO_NAMESPACES,
    "no_landlock": ("landlock",),
    "no_seccomp": ("seccomp",),
    "only_landlock": (*NO_NAMESPACES, "seccomp"),
    "only_seccomp": (*NO_NAMESPACES, "landlock"),
    "only_namespaces": ("landlock", "seccomp"),
    "no_user_namespace": ("namespace:user",),
}


IMPORTABLE = {
    "PYTHONPATH": os.pathsep.join(
        str(Path(each.__file__).parents[depth]) for each, depth in ((layers, 2), (pydantic, 1))
    )
}
"""Environment of an interpreter that has nothing installed."""


def ordinary_user_can_run():
    """Empty, or why another user cannot run this test."""
    if os.geteuid() != 0:
        return "only root can become another user"
    if not os.access(SYSTEM_PYTHON, os.X_OK):
        return "no system interpreter that another user may run"
    script = (
        "import sys; assert sys.version_info >= (3, 11); import kernels_eval.sandbox.confinement"
    )
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", script],
        user=65534,
        group=65534,
        env=IMPORTABLE,
        capture_output=True,
    )
    return (
        ""
        if done.returncode == 0
        else f"another user cannot import this package: {done.stderr[-200:]!r}"
    )


@pytest.mark.parametrize("user", ["this", "nobody"])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_each_layer_holds_by_itself(user, combination):
    """What a confined process reaches is what the layers said to be in force imply, whoever runs it
    and whatever is missing."""
    identity = {}
    if user == "nobody":
        if reason := ordinary_user_can_run():
            pytest.skip(reason)
        identity = {"user": 65534, "group": 65534, "extra_groups": []}
    outside = subprocess.Popen(["sleep", "60"], **identity)
    home = tempfile.mkdtemp(prefix="concur-layers-")
    os.chmod(home, 0o777)
    try:
        interpreter = SYSTEM_PYTHON if identity else sys.executable
        command = [
            interpreter,
            "-c",
            ESCAPES,
            ",".join(COMBINATIONS[combination]),
            f"{home}/s",
            str(outside.pid),
        ]
        done = subprocess.run(command, env=IMPORTABLE, capture_output=True, text=True, **identity)
        assert done.returncode == 0 and done.stdout, done.stderr
        report = json.loads(done.stdout)
        outside_made = os.path.exists(f"{home}/s/work/made")
    finally:
        outside.kill()
        outside.wait()
        shutil.rmtree(home)
    found, seen = set(report["layers"]), report["seen"]
    assert not found & set(COMBINATIONS[combination])
    files, filtered, private = (
        any(name.startswith("landlock") for name in found),
        "seccomp" in found,
        "namespace:pid" in found,
    )
    assert seen["scratch"] == "done"
    assert outside_made is ("tmpfs_scratch" not in found), (
        "with a file system of its own, nothing reaches the disk"
    )
    assert seen["read"] == seen["list"] == ("PermissionError" if files else "done")
    assert seen["socket"] == seen["fork"] == ("PermissionError" if filtered else "done")
    assert filtered is False or seen["unshare"] == "PermissionError"
    reaches_others = not (files or filtered or private)
    assert (seen["signal"] == "done") is reaches_others
    # Root's processes have capabilities, and who has none may not look into those who have.
    less_able = user == "this" and os.geteuid() == 0 and "no_capabilities" in found
    assert (seen["parent"] == "done") is not (files or private or less_able)


def test_a_layer_that_does_not_exist_cannot_be_left_out():
    with pytest.raises(ValueError, match="landlok"):
        layers.probe(("landlok",))


def test_the_numbers_of_system_calls_are_the_kernels():
    """Against the kernel's own headers, where they are installed."""
    checked = 0
    for machine, name in (("x86_64", "asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")):
        found = next(
            (
                path
                for root in ("/usr/include", "/usr/include/x86_64-linux-gnu")
                if (path := Path(root) / name).exists()
            ),
            None,
        )
        if found is None:
            continue
        theirs = {
            key: int(value)
            for key, value in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", found.read_text())
        }
        for call, numbers in seccomp.NUMBERS.items():
            ours = numbers.get(machine)
            if call in theirs or ours is None:
                assert ours == theirs.get(call), (machine, call)
                checked += 1
    if not checked:
        pytest.skip("no kernel headers here")
    assert checked > 40


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("processes", [True, False])
def test_every_filter_is_one_that_the_kernel_can_take(machine, processes):
    code = seccomp.program(processes=processes, own_pid=1, machine=machine)
    steps = [struct.unpack_from("=HBBI", code, offset) for offset in range(0, len(code), 8)]
    assert len(code) % 8 == 0 and len(steps) < 4096 and steps[-1][0] == seccomp.RETURN
    for at, (kind, yes, no, _) in enumerate(steps):
        if kind & 0x07 == 0x05:
            assert at + 1 + max(yes, no) < len(steps), "a jump ends inside the program"


# -- compilers -------------------------------------------------------------------------------------


def test_a_confined_compiler_compiles_and_includes_no_file_of_a_user(tmp_path):
    needs("landlock")
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("no g++ here")
    (tmp_path / "work").mkdir()
    (tmp_path / "private.h").write_text("#error the private header was read\n")
    (tmp_path / "work" / "good.cpp").write_text(
        "#include <vector>\nint main() { return std::vector<int>{0}[0]; }\n"
    )
    (tmp_path / "work" / "bad.cpp").write_text(f'#include "{tmp_path}/private.h"\n')
    (tmp_path / "work" / "endless.cpp").write_text('#include "/dev/zero"\n')
    confine = landlock.compiler_confinement([], [tmp_path / "work"])
    assert confine is not None

    def compiled(source, output, confinement):
        environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "work")}
        command = [compiler, str(tmp_path / "work" / source), "-o", output]
        return subprocess.run(
            command,
            preexec_fn=confinement,
            env=environment,
            capture_output=True,
            text=True,
        )

    good = compiled("good.cpp", str(tmp_path / "work" / "good"), confine)
    assert good.returncode == 0 and (tmp_path / "work" / "good").exists(), good.stderr
    assert "private header was read" in compiled("bad.cpp", "/dev/null", None).stderr, (
        "unconfined it is read"
    )
    bad = compiled("bad.cpp", str(tmp_path / "work" / "bad"), confine)
    assert (
        bad.returncode != 0
        and "private header was read" not in bad.stderr
        and "ermission denied" in bad.stderr
    )
    assert (
        compiled("good.cpp", str(tmp_path / "outside"), confine).returncode != 0
        and not (tmp_path / "outside").exists()
    )
    endless = compiled("endless.cpp", str(tmp_path / "work" / "endless"), confine)
    assert endless.returncode != 0 and "ermission denied" in endless.stderr
    script = "import socket; socket.socket(socket.AF_UNIX)"
    plain = subprocess.run(
        [SYSTEM_PYTHON, "-c", script], preexec_fn=confine, capture_output=True, text=True
    )
    assert "PermissionError" in plain.stderr


# -- health ----------------------------------------------------------------------------------------


def test_this_processor_is_healthy(verify):
    found = check_health(verify.runner.server, "cpu", LIMITS)
    assert found.right and found.free_bytes > 64 << 20


def health(*seen):
    """A DeviceHealth whose checks report this, one after the other; what each was asked for; and
    what was released."""
    left, asked, released = list(seen), [], []

    def check(server, device, limits, wanted_bytes, patience_s):
        asked.append((wanted_bytes, patience_s))
        if isinstance(left[0], Exception):
            raise left.pop(0)
        return left.pop(0)

    return (
        DeviceHealth(
            lambda: None,
            "cuda:0",
            LIMITS,
            lambda: released.append("memory"),
            lambda: released.append("all"),
            check,
        ),
        asked,
        released,
    )


GOOD, SHORT, WRONG = (
    HealthReport(right=True, free_bytes=1000),
    HealthReport(right=True, free_bytes=100),
    HealthReport(right=False, free_bytes=1000),
)
SILENT = ChildFailure(Reason.RUN, "no answer")


def test_one_failed_check_is_forgiven_and_memory_is_waited_for():
    # long only where this worker holds none of it: what its reference holds does not come back
    for first, freed in ((SHORT, "memory"), (WRONG, "all"), (SILENT, "all")):
        one, asked, released = health(GOOD, first, GOOD)
        one.remember()
        one.confirm()
        assert asked == [(0, SOON_S), (900, SOON_S), (900, MEMORY_RETURN_S)]
        assert released == [freed]
    started = time.monotonic()
    request = CheckHealth(device="cpu", wanted_bytes=1 << 60, patience_s=0.2)
    assert check(request).right and time.monotonic() - started > 0.2


@pytest.mark.parametrize(
    "seen, said", [(SHORT, "did not come back"), (WRONG, "was wrong"), (SILENT, "no answer")]
)
def test_two_failed_checks_mean_that_the_gpu_is_lost(seen, said):
    one, _, _ = health(GOOD, seen, seen)
    one.remember()
    with pytest.raises(GpuLostError, match=said) as fault:
        one.confirm()
    assert fault.value.hint and "cuda:0" in str(fault.value)


def test_a_check_whose_process_dies_has_failed(verify):
    lost = DeviceHealth(lambda: verify.runner.server, "cuda:7", LIMITS, lambda: None, lambda: None)
    with pytest.raises(GpuLostError):
        lost.remember()
    assert verify("return ext.honest(x)").reason == "ok"
