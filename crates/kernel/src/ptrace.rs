//! ptrace(2) on seized threads.
//!
//! All calls on a tracee must come from the one OS thread that seized it: the kernel answers
//! `ESRCH` to any other. Functions here take a [`HostPid`] and say what state the tracee must be
//! in; whoever owns the guest keeps those states.

use std::fmt;
use std::time::Duration;

use crate::error::{KernelError, Result, check};
use crate::thread_info;

/// A process or thread number in the host's pid namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPid(pub i32);

impl fmt::Display for HostPid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// `struct user_regs_struct` of x86-64 as words (sys/user.h); see [`reg`] for the indices.
pub type Registers = [u64; 27];

/// Indices into [`Registers`].
pub mod reg {
    /// Callee-saved r15.
    pub const R15: usize = 0;
    /// Callee-saved r14.
    pub const R14: usize = 1;
    /// Callee-saved r13.
    pub const R13: usize = 2;
    /// Callee-saved r12.
    pub const R12: usize = 3;
    /// Takes the flags at a system call.
    pub const R11: usize = 6;
    /// Argument 4 of a system call.
    pub const R10: usize = 7;
    /// Argument 6 of a system call.
    pub const R9: usize = 8;
    /// Argument 5 of a system call.
    pub const R8: usize = 9;
    /// Result.
    pub const RAX: usize = 10;
    /// Takes the instruction pointer at a system call.
    pub const RCX: usize = 11;
    /// Argument 3 of a system call.
    pub const RDX: usize = 12;
    /// Argument 2 of a system call.
    pub const RSI: usize = 13;
    /// Argument 1 of a system call.
    pub const RDI: usize = 14;
    /// System call number at entry; -1 outside a system call.
    pub const ORIG_RAX: usize = 15;
    /// Instruction pointer.
    pub const RIP: usize = 16;
    /// Code segment.
    pub const CS: usize = 17;
    /// Flags.
    pub const EFLAGS: usize = 18;
    /// Stack pointer.
    pub const RSP: usize = 19;
    /// Stack segment.
    pub const SS: usize = 20;
    /// FS base: thread-local storage.
    pub const FS_BASE: usize = 21;
    /// GS base.
    pub const GS_BASE: usize = 22;
}

/// Why a tracee stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A signal is about to be delivered; resume with it or it is lost.
    Signal(i32),
    /// `PTRACE_INTERRUPT`, or a new thread that was attached automatically.
    Interrupted,
    /// Stopped by a job-control signal; resume with [`listen`].
    Group(i32),
    /// `PTRACE_EVENT_FORK`, `_VFORK` or `_CLONE`: the new thread or process.
    Born {
        /// The kernel's event number.
        event: i32,
        /// Who was born.
        child: HostPid,
    },
    /// The parent of a vfork(2) goes on.
    VforkDone,
    /// execve(2) succeeded; the number is the thread's former one.
    Exec {
        /// Thread that called execve.
        former: HostPid,
    },
    /// About to end, everything still there.
    Exiting {
        /// wait(2) status to come.
        status: i32,
    },
    /// System call entry or exit under [`cont_to_syscall`].
    Syscall,
}

/// What wait(2) reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// A tracee stopped.
    Stopped(HostPid, Stop),
    /// A tracee or child ended with this wait(2) status.
    Ended(HostPid, i32),
    /// Nothing to report now.
    Nothing,
    /// No child or tracee is left.
    NoChildren,
}

const OPTIONS: libc::c_int = libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEEXEC
    | libc::PTRACE_O_TRACEVFORKDONE
    | libc::PTRACE_O_EXITKILL;

fn ptrace(
    verb: &'static str,
    request: libc::c_uint,
    tid: HostPid,
    address: usize,
    data: usize,
) -> Result<libc::c_long> {
    // SAFETY: the requests used in this module write only through `data`, which callers point at
    // memory of the size the request documents.
    let value = unsafe { libc::ptrace(request, tid.0, address, data) };
    check(verb, value).map_err(|error| if error.is_died() { KernelError::Died(tid) } else { error })
}

/// Attaches to `tid` without stopping it; its future threads and children are attached too, and
/// all are killed if the calling thread ends (`PTRACE_O_EXITKILL`).
pub fn seize(tid: HostPid) -> Result<()> {
    ptrace("seize thread", libc::PTRACE_SEIZE, tid, 0, OPTIONS as usize).map(drop)
}

/// Lets a stopped tracee make system calls that its seccomp filters forbid, or not any more
/// (`PTRACE_O_SUSPEND_SECCOMP`).
pub fn suspend_seccomp(tid: HostPid, suspended: bool) -> Result<()> {
    const SUSPEND: libc::c_int = 1 << 21;
    let options = if suspended { OPTIONS | SUSPEND } else { OPTIONS };
    ptrace("suspend seccomp", libc::PTRACE_SETOPTIONS, tid, 0, options as usize).map(drop)
}

/// Asks a running tracee to stop; the stop is reported by [`wait`].
pub fn interrupt(tid: HostPid) -> Result<()> {
    ptrace("interrupt thread", libc::PTRACE_INTERRUPT, tid, 0, 0).map(drop)
}

/// Lets a stopped tracee run, delivering `signal` (0 for none).
pub fn cont(tid: HostPid, signal: i32) -> Result<()> {
    ptrace("resume thread", libc::PTRACE_CONT, tid, 0, signal as usize).map(drop)
}

/// Lets a stopped tracee run to the next entry into or exit from a system call.
pub fn cont_to_syscall(tid: HostPid, signal: i32) -> Result<()> {
    ptrace("resume thread to system call", libc::PTRACE_SYSCALL, tid, 0, signal as usize).map(drop)
}

/// Leaves a tracee in its job-control stop, reporting when it ends.
pub fn listen(tid: HostPid) -> Result<()> {
    ptrace("listen to stopped thread", libc::PTRACE_LISTEN, tid, 0, 0).map(drop)
}

/// Lets a stopped tracee go for good.
pub fn detach(tid: HostPid, signal: i32) -> Result<()> {
    ptrace("detach thread", libc::PTRACE_DETACH, tid, 0, signal as usize).map(drop)
}

/// General registers of a stopped tracee.
pub fn registers(tid: HostPid) -> Result<Registers> {
    let mut words: Registers = [0; 27];
    let data = (&raw mut words) as usize;
    ptrace("read registers", libc::PTRACE_GETREGS, tid, 0, data)?;
    Ok(words)
}

/// Sets the general registers of a stopped tracee.
pub fn set_registers(tid: HostPid, words: &Registers) -> Result<()> {
    let data = (words as *const Registers) as usize;
    ptrace("write registers", libc::PTRACE_SETREGS, tid, 0, data).map(drop)
}

const NT_X86_XSTATE: usize = 0x202;

/// The XSAVE area of a stopped tracee, appended to `area` (cleared first).
pub fn extended_registers(tid: HostPid, area: &mut Vec<u8>) -> Result<()> {
    area.resize(16384, 0);
    let mut iov = libc::iovec { iov_base: area.as_mut_ptr().cast(), iov_len: area.len() };
    let data = (&raw mut iov) as usize;
    let request = libc::PTRACE_GETREGSET;
    ptrace("read extended registers", request, tid, NT_X86_XSTATE, data)?;
    area.truncate(iov.iov_len);
    Ok(())
}

/// Sets the XSAVE area of a stopped tracee.
pub fn set_extended_registers(tid: HostPid, area: &[u8]) -> Result<()> {
    let mut iov = libc::iovec { iov_base: area.as_ptr() as *mut _, iov_len: area.len() };
    let data = (&raw mut iov) as usize;
    let request = libc::PTRACE_SETREGSET;
    ptrace("write extended registers", request, tid, NT_X86_XSTATE, data).map(drop)
}

/// Blocked signals of a stopped tracee.
pub fn signal_mask(tid: HostPid) -> Result<u64> {
    let mut mask = 0u64;
    ptrace("read signal mask", 0x420a, tid, 8, (&raw mut mask) as usize)?;
    Ok(mask)
}

/// Sets the blocked signals of a stopped tracee.
pub fn set_signal_mask(tid: HostPid, mask: u64) -> Result<()> {
    ptrace("write signal mask", 0x420b, tid, 8, (&raw const mask) as usize).map(drop)
}

/// `siginfo_t` of the signal being delivered to a stopped tracee.
pub fn signal_info(tid: HostPid) -> Result<[u8; 128]> {
    let mut info = [0u8; 128];
    let data = (&raw mut info) as usize;
    ptrace("read signal information", libc::PTRACE_GETSIGINFO, tid, 0, data)?;
    Ok(info)
}

/// Replaces the signal information of a tracee in a signal-delivery stop; resume with the same
/// signal number to deliver it.
pub fn set_signal_info(tid: HostPid, info: &[u8; 128]) -> Result<()> {
    let data = (info as *const [u8; 128]) as usize;
    ptrace("write signal information", libc::PTRACE_SETSIGINFO, tid, 0, data).map(drop)
}

#[repr(C)]
struct PeekSiginfoArgs {
    offset: u64,
    flags: u32,
    count: i32,
}

/// Signals queued for a stopped tracee, oldest first: for the thread, or `shared` for its process.
pub fn queued_signals(tid: HostPid, shared: bool) -> Result<Vec<[u8; 128]>> {
    let mut all = Vec::new();
    loop {
        let mut batch = [[0u8; 128]; 16];
        let arguments =
            PeekSiginfoArgs { offset: all.len() as u64, flags: u32::from(shared), count: 16 };
        let address = (&raw const arguments) as usize;
        let data = batch.as_mut_ptr() as usize;
        let found = ptrace("read queued signals", 0x4209, tid, address, data)? as usize;
        all.extend_from_slice(&batch[..found.min(16)]);
        if found < 16 {
            return Ok(all);
        }
    }
}

/// Whether a signal tells of an instruction that the thread stands before and that will fault
/// again, so that nothing is lost without it.
///
/// The kernel delivers such a signal before others once it is in a thread's queue, blocked or not
/// (`dequeue_synchronous_signal` looks at the mask for the queue as a whole).
pub fn is_fault(info: &[u8; 128]) -> bool {
    let word = |at: usize| i32::from_ne_bytes(std::array::from_fn(|index| info[at + index]));
    let (signal, code) = (word(0), word(8));
    matches!(signal, libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE) && code > 0
}

/// rseq(2) registration of a stopped tracee: address, size, signature, flags; address 0 for none.
pub fn rseq(tid: HostPid) -> Result<[u64; 4]> {
    #[repr(C)]
    #[derive(Default)]
    struct Configuration {
        pointer: u64,
        size: u32,
        signature: u32,
        flags: u32,
        pad: u32,
    }
    let mut found = Configuration::default();
    let data = (&raw mut found) as usize;
    ptrace("read rseq configuration", 0x420f, tid, size_of::<Configuration>(), data)?;
    Ok([found.pointer, found.size.into(), found.signature.into(), found.flags.into()])
}

/// One classic BPF program of a stopped tracee's seccomp filters, the newest at index 0; `None`
/// past the last. Needs `CONFIG_CHECKPOINT_RESTORE`.
pub fn seccomp_filter(tid: HostPid, index: usize) -> Result<Option<Vec<u8>>> {
    let count = match ptrace("count seccomp filter", 0x420c, tid, index, 0) {
        Ok(count) => count as usize,
        Err(error) if error.errno() == Some(libc::ENOENT) => return Ok(None),
        Err(error) if error.errno() == Some(libc::EINVAL) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut program = vec![0u8; count * 8];
    ptrace("read seccomp filter", 0x420c, tid, index, program.as_mut_ptr() as usize)?;
    Ok(Some(program))
}

fn event_message(tid: HostPid) -> Result<u64> {
    let mut message = 0u64;
    let data = (&raw mut message) as usize;
    ptrace("read ptrace event", libc::PTRACE_GETEVENTMSG, tid, 0, data)?;
    Ok(message)
}

/// Whose news [`wait`] takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Any tracee or child of the calling thread.
    Any,
    /// This one.
    One(HostPid),
}

/// Takes the next piece of news; blocks only if `block`.
///
/// This is the only door through which the project waits for tracees (`__WALL`). Children and
/// tracees of other threads of ours are left alone (`__WNOTHREAD`).
pub fn wait(whose: Whose, block: bool) -> Result<Waited> {
    let mut status: libc::c_int = 0;
    let pid = match whose {
        Whose::Any => -1,
        Whose::One(tid) => tid.0,
    };
    let flags = libc::__WALL | libc::__WNOTHREAD | if block { 0 } else { libc::WNOHANG };
    loop {
        // SAFETY: `status` lives through the call.
        let found = unsafe { libc::waitpid(pid, &raw mut status, flags) };
        if found > 0 {
            return classify(HostPid(found), status);
        }
        if found == 0 {
            return Ok(Waited::Nothing);
        }
        match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) if block => {}
            Some(libc::EINTR) => return Ok(Waited::Nothing),
            Some(libc::ECHILD) => return Ok(Waited::NoChildren),
            _ => return Err(KernelError::last("wait for thread")),
        }
    }
}

/// How soon a tracee is looked at again while news of others waits to be taken.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Waits until this tracee stops and takes that; what else there is to know stays for [`wait`], the
/// end of this very tracee too, which is [`KernelError::Died`] here.
///
/// A thread group leader that was killed cannot be waited for before the group's other threads are,
/// and those may be the caller's own tracees (`delay_group_leader` in the kernel's exit.c): waiting
/// for it alone would be waiting for ever.
pub fn await_stop(tid: HostPid) -> Result<Stop> {
    let news = libc::WEXITED | libc::WSTOPPED | libc::__WALL | libc::__WNOTHREAD | libc::WNOWAIT;
    loop {
        // Blocks until there is something to know of anybody.
        let Some(found) = peek(libc::P_ALL, 0, news)? else { return Err(KernelError::Died(tid)) };
        let own = match found.0 == tid {
            true => Some(found),
            false => peek(libc::P_PID, tid.0 as libc::id_t, news | libc::WNOHANG)?,
        };
        match own {
            Some((_, true)) | None => return Err(KernelError::Died(tid)),
            Some((found, false)) if found == tid => {
                if let Waited::Stopped(_, stop) = wait(Whose::One(tid), false)? {
                    return Ok(stop);
                }
            }
            Some(_) if thread_info::status(tid)?.state == b'Z' => {
                return Err(KernelError::Died(tid));
            }
            Some(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// Of whom there is something to know, nobody if that is number 0, and whether that is their end;
/// `None` if there is nobody to wait for.
fn peek(kind: libc::idtype_t, id: libc::id_t, flags: i32) -> Result<Option<(HostPid, bool)>> {
    loop {
        // SAFETY: all bytes zero are a valid `siginfo_t`.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `info` lives through the call.
        if unsafe { libc::waitid(kind, id, &raw mut info, flags) } == 0 {
            // SAFETY: waitid fills in the fields of SIGCHLD, or leaves zeros.
            let found = HostPid(unsafe { info.si_pid() });
            let ended = [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED];
            return Ok(Some((found, found.0 != 0 && ended.contains(&info.si_code))));
        }
        match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ECHILD) => return Ok(None),
            _ => return Err(KernelError::last("wait for threads")),
        }
    }
}

fn classify(tid: HostPid, status: libc::c_int) -> Result<Waited> {
    if !libc::WIFSTOPPED(status) {
        return Ok(Waited::Ended(tid, status));
    }
    let signal = libc::WSTOPSIG(status);
    let stop = match status >> 16 {
        0 if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
        0 => Stop::Signal(signal),
        libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupted,
        libc::PTRACE_EVENT_STOP => Stop::Group(signal),
        event @ (libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE) => {
            match event_message(tid) {
                Ok(child) => Stop::Born { event, child: HostPid(child as i32) },
                Err(error) if error.is_died() => return Ok(Waited::Nothing),
                Err(error) => return Err(error),
            }
        }
        libc::PTRACE_EVENT_VFORK_DONE => Stop::VforkDone,
        libc::PTRACE_EVENT_EXEC => {
            Stop::Exec { former: HostPid(event_message(tid).unwrap_or(tid.0 as u64) as i32) }
        }
        libc::PTRACE_EVENT_EXIT => Stop::Exiting { status: event_message(tid)? as i32 },
        other => return Err(KernelError::Unexpected(format!("ptrace event {other}"))),
    };
    Ok(Waited::Stopped(tid, stop))
}
