//! Marks of threads and processes.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

use super::writer::{CONTEXT, IT, THERE, Writer};
use super::{read, unknown};
use crate::bpf::{
    self, EXIT, Instruction, Kind, PROBE_READ_KERNEL, add, copy, helper, load, load_word, set,
    shift_left, skip_if_at_most, skip_if_zero, skip_unless_equal,
};
use crate::btf::Btf;
use crate::error::{KernelError, Result};
use crate::ptrace::HostPid;

/// More supplementary groups than this are not looked at.
const GROUPS: usize = 32;
/// Room for a record.
const BUFFER: usize = 8192;
/// Fields at the head of a record, eight bytes each: see [`ThreadMarks::take`].
const HEAD: usize = 5 * 8;
/// Inode number of the first pid namespace (linux/proc_ns.h, `PROC_PID_INIT_INO`).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
const SIGNALS: usize = 64;
const LIMITS: usize = 16;

/// What was seen of a stopped thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadMark {
    /// Signals that wait for it, and for its process.
    pub pending: [u64; 2],
    /// The rest; `None` where not all that matters was seen.
    pub bytes: Option<Vec<u8>>,
}

/// What was seen of a process all of whose threads stand still.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Its threads.
    pub threads: BTreeMap<HostPid, ThreadMark>,
    /// What is common to them.
    pub process: Vec<u8>,
    /// A number that is another one after each change of its mappings (`mm_lock_seq`).
    pub mappings: u64,
}

/// The program, loaded.
#[derive(Debug)]
pub struct ThreadMarks {
    program: OwnedFd,
    /// Of this many bytes after the head is the part of a thread.
    thread_bytes: usize,
    groups_at: usize,
    /// The program has one buffer.
    turn: Mutex<()>,
}

/// The program, pointed at one process.
#[derive(Debug)]
pub struct WatchedThreads(OwnedFd);

impl ThreadMarks {
    pub(super) fn open(btf: &Btf) -> Result<Self> {
        let namespace = std::fs::read_link("/proc/self/ns/pid");
        let namespace = namespace.map_err(KernelError::io("read own pid namespace"))?;
        if namespace.as_os_str() != FIRST_PID_NAMESPACE {
            let what = "a pid namespace of its own, in which threads have other numbers";
            return Err(KernelError::Unexpected(what.into()));
        }
        let buffer = bpf::make_buffer(BUFFER)?;
        let iterator = btf.function("bpf_iter_task").ok_or_else(|| unknown(None))?;
        let mut writer = Writer::new(btf, &buffer);
        let written = writer.write();
        let missing = writer.missing.take();
        let (thread_end, groups_at) = written.ok_or_else(|| unknown(missing))?;
        let program = Kind::Iterator(iterator).load(&writer.code)?;
        Ok(Self {
            program,
            thread_bytes: thread_end - HEAD,
            groups_at: groups_at - HEAD,
            turn: Mutex::new(()),
        })
    }

    /// Points the program at a process.
    pub fn watch(&self, pidfd: &impl AsRawFd) -> Result<WatchedThreads> {
        bpf::iterate_threads(&self.program, pidfd).map(WatchedThreads)
    }

    /// Looks at a process all of whose threads stand still. `text` is scratch space.
    pub fn look(&self, watched: &WatchedThreads, text: &mut Vec<u8>) -> Result<Seen> {
        read(&watched.0, &self.turn, text)?;
        let mut seen = Seen::default();
        let mut rest = &text[..];
        while !rest.is_empty() {
            rest = self
                .take(rest, &mut seen)
                .ok_or_else(|| KernelError::Unexpected("marks of a process".into()))?;
        }
        Ok(seen)
    }

    /// Takes a record: number, length of what follows the head, signals that wait for the thread
    /// and for all, change of the mappings.
    fn take<'a>(&self, record: &'a [u8], seen: &mut Seen) -> Option<&'a [u8]> {
        let word = |index: usize| {
            let bytes = record.get(index * 8..index * 8 + 8)?;
            Some(u64::from_ne_bytes(bytes.try_into().ok()?))
        };
        let (tid, bytes) = (word(0)?, word(1)? as usize);
        let body = record.get(HEAD..HEAD + bytes)?;
        let (thread, process) = body.split_at_checked(self.thread_bytes)?;
        let groups = thread.get(self.groups_at..self.groups_at + 4)?;
        let groups = u32::from_ne_bytes(groups.try_into().ok()?);
        let whole = groups as usize <= GROUPS;
        let mark =
            ThreadMark { pending: [word(2)?, word(3)?], bytes: whole.then(|| thread.to_vec()) };
        seen.threads.insert(HostPid(tid as i32), mark);
        if !process.is_empty() {
            seen.process = process.to_vec();
            seen.mappings = word(4)?;
        }
        record.get(HEAD + bytes..)
    }
}

/// The thread.
const TASK: u8 = IT;

impl Writer<'_> {
    /// Returns where the part of a thread ends, and where the number of groups stands in it.
    fn write(&mut self) -> Option<(usize, usize)> {
        self.code.extend([copy(CONTEXT, 1), load(TASK, CONTEXT, 8)]);
        let begin = self.code.len();
        self.head()?;
        let groups_at = self.thread()?;
        let thread_end = self.at;
        let thread = self.code.split_off(begin);
        self.process()?;
        let all = self.record(self.at);
        let process = self.code.split_off(begin);
        let all_bytes = (self.at - HEAD) as i32;
        // Of all threads, the first also tells of the process.
        let numbers = [("task_struct", "pid"), ("task_struct", "tgid")];
        let [pid, tgid] = numbers.map(|(of, field)| self.place(of, field));
        let numbers_differ = self.two_words(pid?, tgid?);
        let more: Vec<Instruction> = process.into_iter().chain(all).collect();
        let skip_process = (more.len() + self.lengths(all_bytes).len()) as i16;
        let mut body = thread;
        body.extend(self.lengths((thread_end - HEAD) as i32));
        body.extend(numbers_differ);
        body.push(skip_unless_equal(1, 2, skip_process));
        body.extend(self.lengths(all_bytes));
        body.extend(more);
        body.extend(self.record(thread_end));
        // After the last thread there is none.
        self.code.push(skip_if_zero(TASK, body.len() as i16));
        self.code.extend(body);
        self.code.extend([set(0, 0), EXIT]);
        Some((thread_end, groups_at))
    }

    /// Notes the length of the record.
    fn lengths(&self, bytes: i32) -> Vec<Instruction> {
        let mut code = bpf::value_of(1, self.buffer, 8).to_vec();
        code.extend([set(2, bytes), bpf::store(1, 0, 2)]);
        code
    }

    /// Loads two numbers of the thread into registers 1 and 2.
    fn two_words(&self, one: u32, other: u32) -> Vec<Instruction> {
        let mut code = Vec::new();
        for (place, offset) in [(-8, one), (-16, other)] {
            code.extend([copy(1, 10), add(1, place), set(2, 4)]);
            code.extend([copy(3, TASK), add(3, offset as i32), helper(PROBE_READ_KERNEL)]);
        }
        code.extend([load_word(1, 10, -8), load_word(2, 10, -16)]);
        code
    }

    fn head(&mut self) -> Option<()> {
        self.bytes(TASK, "task_struct", "pid", 4)?;
        self.at += 8;
        let signals = self.place("sigpending", "signal")?;
        let own = self.place("task_struct", "pending")?;
        self.at_offset(TASK, own + signals, 8);
        self.follow(TASK, "task_struct", "signal")?;
        let shared = self.place("signal_struct", "shared_pending")?;
        self.at_offset(THERE, shared + signals, 8);
        self.follow(TASK, "task_struct", "mm")?;
        self.bytes(THERE, "mm_struct", "mm_lock_seq", 4)?;
        (self.at == HEAD).then_some(())
    }

    /// What sigaltstack(2), prctl(2), get_robust_list(2), `status`, `comm`, sched_getattr(2),
    /// sched_getaffinity(2), ioprio_get(2) tell of a thread.
    fn thread(&mut self) -> Option<usize> {
        const TASK_STRUCT: &str = "task_struct";
        self.words(
            TASK,
            TASK_STRUCT,
            &[
                "sas_ss_sp",
                "sas_ss_size",
                "clear_child_tid",
                "timer_slack_ns",
                "robust_list",
                "atomic_flags",
                "real_cred",
                "cred",
                "mm",
                "signal",
                "sighand",
                "fs",
            ],
        )?;
        let halves = ["sas_ss_flags", "pdeath_signal", "policy", "static_prio", "rt_priority"];
        self.halves(TASK, TASK_STRUCT, &halves)?;
        self.bytes(TASK, TASK_STRUCT, "comm", 16)?;
        self.bytes(TASK, TASK_STRUCT, "seccomp", 16)?;
        self.bit(TASK, TASK_STRUCT, "sched_reset_on_fork")?;
        let processors = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_CONF);
        let processors = processors.ok().flatten()? as usize;
        self.bytes(TASK, TASK_STRUCT, "cpus_mask", processors.div_ceil(64) * 8)?;
        self.follow(TASK, TASK_STRUCT, "io_context")?;
        self.bytes(THERE, "io_context", "ioprio", 2)?;
        self.follow(TASK, TASK_STRUCT, "real_cred")?;
        let ids = ["uid", "gid", "suid", "sgid", "euid", "egid", "fsuid", "fsgid", "securebits"];
        self.halves(THERE, "cred", &ids)?;
        let sets = ["cap_inheritable", "cap_permitted", "cap_effective", "cap_bset", "cap_ambient"];
        self.words(THERE, "cred", &sets)?;
        self.words(THERE, "cred", &["user_ns", "group_info"])?;
        self.follow(THERE, "cred", "group_info")?;
        self.groups()
    }

    fn groups(&mut self) -> Option<usize> {
        let groups_at = self.bytes(THERE, "group_info", "ngroups", 4)?;
        let gids = self.place("group_info", "gid")? as i32;
        let room = self.at;
        self.at += GROUPS * 4;
        self.code.extend(bpf::value_of(1, self.buffer, room));
        // Nothing is at address 0, so this makes zeroes.
        self.code.extend([set(2, GROUPS as i32 * 4), set(3, 0), helper(PROBE_READ_KERNEL)]);
        self.code.extend(bpf::value_of(1, self.buffer, groups_at));
        self.code.extend([load_word(2, 1, 0), skip_if_at_most(2, GROUPS as i32, 1)]);
        self.code.extend([set(2, GROUPS as i32), shift_left(2, 2)]);
        self.code.extend(bpf::value_of(1, self.buffer, room));
        self.code.extend([copy(3, THERE), add(3, gids), helper(PROBE_READ_KERNEL)]);
        Some(groups_at)
    }

    /// What rt_sigaction(2), getitimer(2), prctl(2), membarrier(2), brk(2), personality(2),
    /// prlimit(2), `status`, `oom_score_adj` tell of a process, and whether it has POSIX timers
    /// and locks what it will map.
    fn process(&mut self) -> Option<()> {
        self.halves(TASK, "task_struct", &["personality", "tgid", "exit_signal"])?;
        self.follow(TASK, "task_struct", "real_parent")?;
        self.halves(THERE, "task_struct", &["tgid"])?;
        self.follow(TASK, "task_struct", "fs")?;
        self.halves(THERE, "fs_struct", &["umask"])?;
        self.follow(TASK, "task_struct", "mm")?;
        self.words(THERE, "mm_struct", &["flags", "def_flags", "brk"])?;
        self.halves(THERE, "mm_struct", &["membarrier_state"])?;
        self.follow(TASK, "task_struct", "sighand")?;
        self.bytes(THERE, "sighand_struct", "action", SIGNALS * 32)?;
        let number = self.place("pid", "numbers")? + self.place("upid", "nr")?;
        let pids = self.place("signal_struct", "pids")?;
        // Of its group and its session.
        for kind in [2, 3] {
            self.follow(TASK, "task_struct", "signal")?;
            self.follow_offset(THERE, pids + kind * 8);
            self.at_offset(THERE, number, 4);
        }
        self.follow(TASK, "task_struct", "signal")?;
        self.bytes(THERE, "signal_struct", "rlim", LIMITS * 16)?;
        self.bytes(THERE, "signal_struct", "it", 32)?;
        self.words(THERE, "signal_struct", &["it_real_incr", "posix_timers"])?;
        let node = self.place("hrtimer", "node")? + self.place("timerqueue_node", "expires")?;
        let alarm = self.place("signal_struct", "real_timer")?;
        self.at_offset(THERE, alarm + node, 8);
        self.bit(THERE, "signal_struct", "is_child_subreaper")?;
        self.bytes(THERE, "signal_struct", "oom_score_adj", 2).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::super::Marks;
    use super::*;
    use crate::pidfd;
    use crate::shared::SharedMapping;

    /// Of ourselves, so that other tests' threads may appear and change meanwhile.
    struct Own(WatchedThreads);

    impl Own {
        fn new() -> Self {
            let marks = &Marks::load().expect("loads").threads;
            let own = pidfd::open(HostPid(std::process::id() as i32)).expect("opens");
            Self(marks.watch(&own).expect("watches"))
        }

        fn look(&self) -> Seen {
            let marks = &Marks::loaded().expect("was loaded").threads;
            marks.look(&self.0, &mut Vec::new()).expect("looks")
        }

        fn thread(&self) -> ThreadMark {
            let tid = HostPid(nix::unistd::gettid().as_raw());
            // The kernel finds the next thread from the one before; where that ends meanwhile, as
            // those of other tests do and those of a guest that stands still do not, it sees no
            // more. Nothing else may hide this thread.
            loop {
                let before = numbers();
                if let Some(mark) = self.look().threads.remove(&tid) {
                    return mark;
                }
                let now = numbers();
                assert!(before.iter().any(|one| !now.contains(one)), "does not see this thread");
            }
        }
    }

    /// Of our threads.
    fn numbers() -> Vec<std::ffi::OsString> {
        let all = std::fs::read_dir("/proc/self/task").expect("lists threads");
        all.filter_map(|one| Some(one.ok()?.file_name())).collect()
    }

    #[test]
    fn a_thread_that_changes_nothing_has_the_same_mark() {
        let own = Own::new();
        let before = own.thread();
        assert!(before.bytes.is_some());
        std::thread::yield_now();
        assert_eq!(own.thread(), before);
    }

    #[test]
    fn what_a_thread_changes_about_itself_is_seen() {
        let own = Own::new();
        let mut last = own.thread();
        let mut changed = |what: &str| {
            let now = own.thread();
            assert_ne!(now, last, "{what}");
            last = now;
        };
        nix::sys::prctl::set_name(c"renamed").expect("renames");
        changed("name");
        nix::sys::prctl::set_timerslack(77_777).expect("sets timer slack");
        changed("timer slack");
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGUSR2).expect("sets");
        changed("signal at the parent's death");
        let mut processors = nix::sched::CpuSet::new();
        processors.set(0).expect("sets a processor");
        let this = nix::unistd::Pid::from_raw(0);
        nix::sched::sched_setaffinity(this, &processors).expect("binds");
        changed("affinity");
        let mask = nix::sys::signal::SigSet::from(nix::sys::signal::Signal::SIGWINCH);
        mask.thread_block().expect("blocks");
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGWINCH).expect("sends");
        changed("pending signal");
    }

    #[test]
    fn what_a_process_changes_about_itself_is_seen() {
        use nix::sys::resource::{Resource, getrlimit, setrlimit};
        use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

        let own = Own::new();
        let before = own.look().process;
        assert!(!before.is_empty());
        let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
        // SAFETY: no handler runs.
        unsafe { sigaction(Signal::SIGURG, &ignore) }.expect("ignores");
        let with_action = own.look().process;
        assert_ne!(with_action, before);
        let (soft, hard) = getrlimit(Resource::RLIMIT_CORE).expect("reads");
        setrlimit(Resource::RLIMIT_CORE, soft ^ 4096, hard.max(soft ^ 4096)).expect("sets");
        assert_ne!(own.look().process, with_action);
    }

    #[test]
    fn a_change_of_the_mappings_has_another_number() {
        let own = Own::new();
        let file = memfd_create(c"marks", MFdFlags::empty()).expect("makes memory");
        nix::unistd::ftruncate(&file, 4096).expect("gives it a size");
        let before = own.look().mappings;
        let mapping = SharedMapping::new(file.as_fd(), 4096).expect("maps");
        let mapped = own.look().mappings;
        assert_ne!(mapped, before);
        drop(mapping);
        assert_ne!(own.look().mappings, mapped);
    }
}
