//! Making processes and dressing their surroundings: clone3(2) with chosen numbers, mounts,
//! descriptors at chosen numbers.
//!
//! What forks here is refused in a process with several threads: the child would hold locks that
//! nobody releases.

use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::error::{KernelError, Result, check};

/// `struct clone_args` of clone3(2), all eleven words.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CloneArgs {
    /// `CLONE_*`.
    pub flags: u64,
    /// Where to store the pidfd (`CLONE_PIDFD`).
    pub pidfd: u64,
    /// Where to store the number in the child.
    pub child_tid: u64,
    /// Where to store the number in the parent.
    pub parent_tid: u64,
    /// Signal for the parent when the child ends.
    pub exit_signal: u64,
    /// Lowest byte of the child's stack.
    pub stack: u64,
    /// Size of the child's stack.
    pub stack_bytes: u64,
    /// Thread-local storage.
    pub tls: u64,
    /// Address of the wanted numbers, innermost namespace first.
    pub set_tid: u64,
    /// How many numbers.
    pub set_tid_count: u64,
    /// cgroup descriptor.
    pub cgroup: u64,
}

/// Bytes of [`CloneArgs`].
pub const CLONE_ARGS_BYTES: usize = size_of::<CloneArgs>();

impl CloneArgs {
    /// The structure as the kernel reads it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let words = [
            self.flags,
            self.pidfd,
            self.child_tid,
            self.parent_tid,
            self.exit_signal,
            self.stack,
            self.stack_bytes,
            self.tls,
            self.set_tid,
            self.set_tid_count,
            self.cgroup,
        ];
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }
}

/// Which side of a fork we are on.
#[derive(Debug)]
pub enum Forked {
    /// The child.
    Child,
    /// The parent.
    Parent {
        /// The child's number in our pid namespace.
        pid: i32,
        /// Stands for the child.
        pidfd: OwnedFd,
    },
}

/// Forks the calling process with extra clone `flags`; the child gets number `set_tid` in its pid
/// namespace where given (clone3(2)).
///
/// With `CLONE_PARENT` the child is our sibling. Fails in a process with several threads.
pub fn fork_alone(flags: u64, set_tid: Option<i32>) -> Result<Forked> {
    let threads =
        std::fs::read_dir("/proc/self/task").map_err(KernelError::io("count own threads"))?.count();
    if threads != 1 {
        return Err(KernelError::Unexpected(format!("fork of a process with {threads} threads")));
    }
    let mut pidfd: i32 = -1;
    let number = set_tid.unwrap_or(0);
    let sibling = flags & libc::CLONE_PARENT as u64 != 0;
    let args = CloneArgs {
        flags: flags | libc::CLONE_PIDFD as u64,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: if sibling { 0 } else { libc::SIGCHLD as u64 },
        set_tid: if set_tid.is_some() { (&raw const number) as u64 } else { 0 },
        set_tid_count: set_tid.is_some().into(),
        ..CloneArgs::default()
    };
    // SAFETY: without CLONE_VM the child is a copy of this single-threaded process; `args` and
    // what it points at live through the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, CLONE_ARGS_BYTES) };
    match check("fork", pid)? {
        0 => Ok(Forked::Child),
        pid => {
            // SAFETY: the kernel just stored this descriptor.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Forked::Parent { pid: pid as i32, pidfd })
        }
    }
}

/// Gives all signals their default action and unblocks them, as a new program expects.
pub fn default_signals() {
    for signal in 1..=64 {
        if signal != libc::SIGKILL && signal != libc::SIGSTOP {
            let default = [0u64; 4];
            let (number, none) = (libc::SYS_rt_sigaction, std::ptr::null::<u64>());
            // SAFETY: four zero words are a `struct kernel_sigaction` with the default action.
            unsafe { libc::syscall(number, signal, default.as_ptr(), none, 8) };
        }
    }
    let empty = 0u64;
    let (number, none) = (libc::SYS_rt_sigprocmask, std::ptr::null::<u64>());
    // SAFETY: `empty` is a signal set of eight bytes.
    unsafe { libc::syscall(number, libc::SIG_SETMASK, &raw const empty, none, 8) };
}

/// Makes `command`'s program inherit these descriptors, at the numbers they have here. Other
/// programs that this process starts do not.
pub fn pass_descriptors(command: &mut Command, descriptors: Vec<OwnedFd>) {
    let keep = move || {
        for fd in &descriptors {
            // SAFETY: no pointer is passed.
            if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only changes flags of descriptors it owns.
    unsafe { command.pre_exec(keep) };
}

/// Takes over descriptor `number` that this program was started with; close-on-exec from now on.
pub fn inherited(number: i32) -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let done = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    check("find inherited descriptor", done.into())?;
    // SAFETY: the descriptor is open and, by this program's protocol, nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A duplicate of `fd` at `number`, open across exec. What was at `number` is closed: only for a
/// fresh child, just before exec.
pub fn place_for_exec(fd: BorrowedFd<'_>, number: i32) -> Result<()> {
    if fd.as_raw_fd() == number {
        // SAFETY: no pointer is passed.
        let done = unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
        return check("keep descriptor open", done.into()).map(drop);
    }
    // SAFETY: no pointer is passed.
    let done = unsafe { libc::dup2(fd.as_raw_fd(), number) };
    check("place descriptor", done.into()).map(drop)
}

/// All descriptors from 3 on are closed by the next exec.
pub fn close_on_exec_from_3() -> Result<()> {
    let (number, last) = (libc::SYS_close_range, u32::MAX);
    // SAFETY: no pointer is passed.
    let done = unsafe { libc::syscall(number, 3u32, last, libc::CLOSE_RANGE_CLOEXEC) };
    check("mark descriptors", done).map(drop)
}

/// Makes the mount at `path` read-only or writable, with all mounts below it where `recursive`
/// (mount_setattr(2)).
pub fn set_mount_read_only(path: &CStr, read_only: bool, recursive: bool) -> Result<()> {
    const READ_ONLY: u64 = 1;
    let mut attributes = [0u64; 4];
    attributes[usize::from(!read_only)] = READ_ONLY;
    let flags = if recursive { libc::AT_RECURSIVE } else { 0 };
    let bytes = size_of_val(&attributes);
    let (number, at, path) = (libc::SYS_mount_setattr, libc::AT_FDCWD, path.as_ptr());
    // SAFETY: `path` ends with a zero byte; `attributes` is a `struct mount_attr` of 32 bytes.
    let done = unsafe { libc::syscall(number, at, path, flags, attributes.as_ptr(), bytes) };
    check("change mount attributes", done).map(drop)
}

/// Brings a network interface of the calling thread's network namespace up (netdevice(7)).
pub fn interface_up(name: &str) -> Result<()> {
    let socket = crate::socket::create(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
    let mut request = [0u8; 40];
    let bytes = name.as_bytes();
    if bytes.len() >= 16 {
        return Err(KernelError::Unexpected(format!("interface name {name}")));
    }
    request[..bytes.len()].copy_from_slice(bytes);
    let up = (libc::IFF_UP | libc::IFF_RUNNING) as u16;
    request[16..18].copy_from_slice(&up.to_ne_bytes());
    // SAFETY: `request` is a `struct ifreq` of 40 bytes.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, request.as_ptr()) };
    check("bring interface up", done.into()).map(drop)
}

/// An address space that was mapped shared and anonymous, as a descriptor on its memory.
///
/// The memory lives as long as the descriptor. Unlike a memfd it shows as `/dev/zero` in maps.
pub fn shared_anonymous(bytes: u64) -> Result<OwnedFd> {
    let length = bytes as usize;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let null = std::ptr::null_mut();
    // SAFETY: a fresh mapping at an address the kernel picks.
    let start = unsafe { libc::mmap(null, length, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(KernelError::last("make shared memory"));
    }
    let first = start as u64;
    let end = first + bytes.next_multiple_of(4096);
    let opened = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/map_files/{first:x}-{end:x}"))
        .map_err(KernelError::io("open shared memory"));
    // SAFETY: nobody has a reference into the mapping.
    unsafe { libc::munmap(start, length) };
    opened.map(OwnedFd::from)
}

/// memfd_create(2) with seals allowed.
pub fn memfd(name: &CStr) -> Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: `name` ends with a zero byte.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    let fd = check("create memfd", fd.into())?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Limits of process `pid`: resource number, soft and hard limit (prlimit(2)).
pub fn set_limit(pid: crate::HostPid, resource: u32, soft: u64, hard: u64) -> Result<()> {
    let limit = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
    let none = std::ptr::null_mut::<libc::rlimit64>();
    let number = libc::SYS_prlimit64;
    // SAFETY: `limit` lives through the call.
    let done = unsafe { libc::syscall(number, pid.0, resource, &raw const limit, none) };
    check("set limit", done).map(drop)
}

/// Scheduling policy, priority and reset-on-fork flag of thread `tid`, then its nice value, which
/// some policies would leave alone (sched_setattr(2), setpriority(2)).
pub fn set_scheduling(
    tid: crate::HostPid,
    policy: u32,
    priority: u32,
    nice: i32,
    reset_on_fork: bool,
) -> Result<()> {
    let mut attributes = [0u32; 14];
    attributes[0] = size_of_val(&attributes) as u32;
    attributes[1] = policy;
    attributes[2] = reset_on_fork.into();
    attributes[4] = nice as u32;
    attributes[5] = priority;
    let number = libc::SYS_sched_setattr;
    // SAFETY: `attributes` is a `struct sched_attr` of 56 bytes.
    let done = unsafe { libc::syscall(number, tid.0, attributes.as_ptr(), 0) };
    check("set scheduling", done)?;
    // SAFETY: no pointer is passed.
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, tid.0 as u32, nice) };
    check("set niceness", done.into()).map(drop)
}

/// Processors thread `tid` may run on, 64 a word (sched_setaffinity(2)).
pub fn set_affinity(tid: crate::HostPid, mask: &[u64]) -> Result<()> {
    let (number, bytes) = (libc::SYS_sched_setaffinity, size_of_val(mask));
    // SAFETY: pointer and length describe the slice, which is only read.
    let done = unsafe { libc::syscall(number, tid.0, bytes, mask.as_ptr()) };
    check("set affinity", done).map(drop)
}

/// Address and number of the do-nothing program's code.
const IDLE_CODE_AT: u64 = 0x1_0000;

/// A program of a few instructions that waits for ever: a process with next to no memory, for a
/// ghost to be built in. The descriptor can be executed (execveat(2), `AT_EMPTY_PATH`).
pub fn idle_program() -> Result<OwnedFd> {
    const HEADERS: u64 = 64 + 56;
    // mov eax, SYS_pause; syscall; jmp back.
    let code = [0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    elf.extend(2u16.to_le_bytes()); // executable
    elf.extend(62u16.to_le_bytes()); // x86-64
    elf.extend(1u32.to_le_bytes());
    elf.extend((IDLE_CODE_AT + HEADERS).to_le_bytes()); // entry
    elf.extend(64u64.to_le_bytes()); // program headers
    elf.extend(0u64.to_le_bytes()); // no sections
    elf.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1u32.to_le_bytes()); // load
    elf.extend(5u32.to_le_bytes()); // readable, executable
    for word in [0, IDLE_CODE_AT, IDLE_CODE_AT] {
        elf.extend(word.to_le_bytes());
    }
    let bytes = HEADERS + code.len() as u64;
    for word in [bytes, bytes, 4096] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(code);
    let mut writer = File::from(memfd(c"hotspare-ghost")?);
    writer.write_all(&elf).map_err(KernelError::io("write idle program"))?;
    // A file that is open for writing cannot be executed.
    let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    let reader = File::open(path).map_err(KernelError::io("open idle program"))?;
    Ok(reader.into())
}
