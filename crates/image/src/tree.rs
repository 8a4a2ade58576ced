//! Processes and threads: everything the kernel keeps of them except memory and descriptors.

use minicbor::{Decode, Encode};

use crate::memory::{GuestAddr, MmId};
use crate::numeric_name;
use crate::objects::Descriptor;

numeric_name!(
    /// A process, thread, group or session number in the guest's pid namespace.
    GuestPid(i32)
);

/// A path in the guest's mount namespace. Bytes, because Linux paths are.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(transparent)]
pub struct HostPath(#[n(0)] pub String);

/// The guest's clocks when the guest stood still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct ClockReading {
    /// `CLOCK_REALTIME`, ns.
    #[n(0)]
    pub realtime_ns: u64,
    /// `CLOCK_MONOTONIC` as the guest sees it, ns.
    #[n(1)]
    pub monotonic_ns: u64,
    /// `CLOCK_BOOTTIME` as the guest sees it, ns.
    #[n(2)]
    pub boottime_ns: u64,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Process {
    /// Thread group id.
    #[n(0)]
    pub pid: GuestPid,
    /// Parent; 1 is our init.
    #[n(1)]
    pub parent: GuestPid,
    /// Process group.
    #[n(2)]
    pub group: GuestPid,
    /// Session; 0 for the session of our init.
    #[n(3)]
    pub session: GuestPid,
    /// Alive, or a zombie that its parent has not waited for.
    #[n(4)]
    pub state: ProcessState,
    /// Signal its parent gets when it ends (clone(2)), usually `SIGCHLD`.
    #[n(5)]
    pub exit_signal: i32,
}

/// Whether a process lives.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum ProcessState {
    /// Has memory, threads, descriptors.
    #[n(0)]
    Alive(#[n(0)] Box<LiveProcess>),
    /// Ended; only the wait(2) status is left.
    #[n(1)]
    Zombie {
        /// As wait(2) will report it.
        #[n(0)]
        wait_status: i32,
        /// Its name, /proc/PID/comm.
        #[n(1)]
        name: String,
    },
}

/// What a living process has beyond its place in the tree.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct LiveProcess {
    /// Its address space.
    #[n(0)]
    pub mm: MmId,
    /// Threads, the group leader first.
    #[n(1)]
    pub threads: Vec<Thread>,
    /// Descriptor table in order of number.
    #[n(2)]
    pub descriptors: Vec<Descriptor>,
    /// Actions of signals 1…64, `struct kernel_sigaction` words: handler, flags, restorer, mask.
    #[n(3)]
    pub signal_actions: Vec<SignalAction>,
    /// Signals pending for the process as a whole, oldest first.
    #[n(4)]
    pub pending: Vec<QueuedSignal>,
    /// getitimer(2): real, virtual, prof; interval and value in µs.
    #[n(5)]
    pub interval_timers: [IntervalTimer; 3],
    /// timer_create(2).
    #[n(6)]
    pub posix_timers: Vec<PosixTimer>,
    /// Soft and hard limit of each resource, in the kernel's order.
    #[n(7)]
    pub limits: Vec<(u64, u64)>,
    /// umask(2).
    #[n(8)]
    pub umask: u32,
    /// Working directory.
    #[n(9)]
    pub cwd: HostPath,
    /// Root directory.
    #[n(10)]
    pub root: HostPath,
    /// `PR_SET_CHILD_SUBREAPER`.
    #[n(11)]
    pub child_subreaper: bool,
    /// personality(2).
    #[n(12)]
    pub personality: u32,
    /// `/proc/PID/oom_score_adj`.
    #[n(13)]
    pub oom_score_adj: i32,
    /// Stopped by a job-control signal (this one), not by us.
    #[n(14)]
    pub job_stopped: Option<i32>,
    /// Controlling terminal is the (detached) one of the guest's stdin.
    #[n(15)]
    pub has_terminal: bool,
}

/// A thread.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Thread {
    /// Its number in the guest.
    #[n(0)]
    pub tid: GuestPid,
    /// `struct user_regs_struct` as `PTRACE_GETREGS` gives it (27 words).
    #[n(1)]
    pub registers: [u64; 27],
    /// `PTRACE_GETREGSET(NT_X86_XSTATE)`, in the processor's non-compacted layout.
    #[n(2)]
    #[cbor(with = "minicbor::bytes")]
    pub extended: Vec<u8>,
    /// Blocked signals.
    #[n(3)]
    pub signal_mask: u64,
    /// Signals pending for this thread, oldest first; one that was being delivered comes first.
    #[n(4)]
    pub pending: Vec<QueuedSignal>,
    /// sigaltstack(2): ss_sp, ss_flags, ss_size.
    #[n(5)]
    pub alternate_stack: [u64; 3],
    /// get_robust_list(2): head, length.
    #[n(6)]
    pub robust_list: [u64; 2],
    /// `PR_GET_TID_ADDRESS`.
    #[n(7)]
    pub clear_tid: GuestAddr,
    /// `PTRACE_GET_RSEQ_CONFIGURATION`: address, size, signature, flags; address 0 for none.
    #[n(8)]
    pub rseq: [u64; 4],
    /// Who it acts as.
    #[n(9)]
    pub credentials: Credentials,
    /// `PR_GET_NAME`; bytes up to the first zero.
    #[n(10)]
    #[cbor(with = "minicbor::bytes")]
    pub name: Vec<u8>,
    /// Scheduling policy, priority, nice value.
    #[n(11)]
    pub scheduling: Scheduling,
    /// seccomp(2).
    #[n(12)]
    pub seccomp: Seccomp,
    /// `PR_SET_PDEATHSIG`.
    #[n(13)]
    pub parent_death_signal: i32,
    /// `PR_SET_TIMERSLACK`, ns.
    #[n(14)]
    pub timer_slack_ns: u64,
    /// ioprio_get(2).
    #[n(15)]
    pub io_priority: i32,
    /// A system call that goes on by `restart_syscall` after an interruption; `None` where the
    /// registers show -ERESTART_RESTARTBLOCK means that it cannot be known which.
    #[n(16)]
    pub restart: Option<Restart>,
}

/// An interrupted, timed system call (restart_syscall(2)).
#[derive(Clone, Copy, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Restart {
    /// How long it had been blocked when the guest stood still, ns, at least.
    #[n(0)]
    pub blocked_ns: u64,
    /// Number of the system call that was interrupted first. After the first interruption the
    /// registers only show `restart_syscall`; the arguments stay in their registers.
    #[n(1)]
    pub call: i64,
}

/// `struct kernel_sigaction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct SignalAction {
    /// Handler address, 0 default, 1 ignore.
    #[n(0)]
    pub handler: u64,
    /// `SA_*`.
    #[n(1)]
    pub flags: u64,
    /// Restorer address.
    #[n(2)]
    pub restorer: u64,
    /// Signals blocked while it runs.
    #[n(3)]
    pub mask: u64,
}

/// A signal on its way, as `siginfo_t` (128 bytes).
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct QueuedSignal {
    /// The kernel's `siginfo_t`.
    #[n(0)]
    #[cbor(with = "minicbor::bytes")]
    pub siginfo: Vec<u8>,
}

/// `struct itimerval`, µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct IntervalTimer {
    /// Period.
    #[n(0)]
    pub interval_us: u64,
    /// Time to the next expiry; 0 is disarmed.
    #[n(1)]
    pub value_us: u64,
}

/// A timer of timer_create(2).
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct PosixTimer {
    /// The kernel's timer id.
    #[n(0)]
    pub id: i32,
    /// Clock number.
    #[n(1)]
    pub clock: i32,
    /// `SIGEV_*` with `SIGEV_THREAD_ID`.
    #[n(2)]
    pub notify: i32,
    /// Signal.
    #[n(3)]
    pub signal: i32,
    /// `sigev_value`.
    #[n(4)]
    pub value: u64,
    /// Thread it signals, where `SIGEV_THREAD_ID`.
    #[n(5)]
    pub thread: GuestPid,
    /// Period, ns.
    #[n(6)]
    pub interval_ns: u64,
    /// Time to the next expiry, ns; 0 is disarmed.
    #[n(7)]
    pub value_ns: u64,
    /// timer_getoverrun(2).
    #[n(8)]
    pub overrun: i32,
}

/// Credentials of a thread (credentials(7), capabilities(7)).
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Credentials {
    /// Real, effective, saved, file system.
    #[n(0)]
    pub uids: [u32; 4],
    /// Real, effective, saved, file system.
    #[n(1)]
    pub gids: [u32; 4],
    /// Supplementary groups.
    #[n(2)]
    pub groups: Vec<u32>,
    /// Inheritable, permitted, effective, bounding, ambient sets.
    #[n(3)]
    pub capabilities: [u64; 5],
    /// `PR_GET_SECUREBITS`.
    #[n(4)]
    pub securebits: u32,
    /// `PR_GET_NO_NEW_PRIVS`.
    #[n(5)]
    pub no_new_privs: bool,
}

/// Scheduling of a thread (sched(7)).
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Scheduling {
    /// `SCHED_*`.
    #[n(0)]
    pub policy: u32,
    /// Real-time priority.
    #[n(1)]
    pub priority: u32,
    /// Nice value.
    #[n(2)]
    pub nice: i32,
    /// Affinity mask, 64 processors a word; empty where it is all of the host's.
    #[n(3)]
    pub affinity: Vec<u64>,
    /// `SCHED_FLAG_RESET_ON_FORK`.
    #[n(4)]
    pub reset_on_fork: bool,
}

/// seccomp(2) state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Seccomp {
    /// 0 off, 1 strict, 2 filters.
    #[n(0)]
    pub mode: u32,
    /// Classic BPF programs (8 bytes an instruction), the one installed first at the front.
    #[n(1)]
    pub filters: Vec<SeccompFilter>,
}

/// One filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct SeccompFilter {
    /// `struct sock_filter` array.
    #[n(0)]
    #[cbor(with = "minicbor::bytes")]
    pub program: Vec<u8>,
    /// `SECCOMP_FILTER_FLAG_LOG`.
    #[n(1)]
    pub flags: u64,
}
