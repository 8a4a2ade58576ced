//! Processes of a stopped guest: what belongs to all threads of a process together.

use hotspare_image::memory::Layout;
use hotspare_image::tree::{
    GuestPid, HostPath, IntervalTimer, LiveProcess, PosixTimer, QueuedSignal, SignalAction,
};
use hotspare_kernel::kept_file::KeptFile;
use hotspare_kernel::remote::{Call, Stub};
use hotspare_kernel::thread_info::{self, Status};
use hotspare_kernel::{HostPid, KernelError, ptrace};

use crate::objects::error::{ObjectError, ObjectResult};

const SIGNALS: usize = 64;
const ACTION_BYTES: usize = 32;
const TIMER_BYTES: usize = 32;
/// Calls before the POSIX timers' own.
const FIXED_CALLS: usize = SIGNALS + 3 + 6 + PROBES;
/// Calls that find out whether future mappings are locked.
const PROBES: usize = 4;
/// POSIX timers asked for in one batch.
pub const TIMERS_MAX: usize = 150;

/// Offsets in the scratch memory.
const ITIMERS_AT: usize = SIGNALS * ACTION_BYTES;
const SUBREAPER_AT: usize = ITIMERS_AT + 3 * TIMER_BYTES;
const TIMERS_AT: usize = SUBREAPER_AT + 8;

const MEMBARRIER_GET_REGISTRATIONS: u64 = 1 << 9;

/// The calls that tell what a process cannot be asked from outside, with results in `scratch`.
/// `probe` is a page to map anew ([`Stub::probe_page`]).
pub fn ask(scratch: u64, probe: u64, timers: &[TimerLine]) -> Vec<Call> {
    let at = |offset: usize| scratch + offset as u64;
    let mut calls = Vec::with_capacity(FIXED_CALLS + 2 * timers.len());
    for signal in 0..SIGNALS {
        let arguments = [signal as u64 + 1, 0, at(signal * ACTION_BYTES), 8];
        calls.push(Call::new(libc::SYS_rt_sigaction, &arguments));
    }
    for timer in 0..3 {
        let arguments = [timer as u64, at(ITIMERS_AT + timer * TIMER_BYTES)];
        calls.push(Call::new(libc::SYS_getitimer, &arguments));
    }
    let get = |what: i32, to: u64| Call::new(libc::SYS_prctl, &[what as u64, to, 0, 0, 0]);
    calls.push(get(libc::PR_GET_CHILD_SUBREAPER, at(SUBREAPER_AT)));
    calls.push(get(libc::PR_GET_DUMPABLE, 0));
    calls.push(get(libc::PR_GET_THP_DISABLE, 0));
    calls.push(Call::new(libc::SYS_membarrier, &[MEMBARRIER_GET_REGISTRATIONS, 0, 0]));
    calls.push(Call::new(libc::SYS_brk, &[0]));
    calls.push(Call::new(libc::SYS_personality, &[0xffff_ffff]));
    calls.extend(ask_of_future_mappings(probe));
    for (index, timer) in timers.iter().enumerate() {
        let id = timer.id as u64;
        let to = at(TIMERS_AT + index * TIMER_BYTES);
        calls.push(Call::new(libc::SYS_timer_gettime, &[id, to]));
        calls.push(Call::new(libc::SYS_timer_getoverrun, &[id]));
    }
    calls
}

/// mlockall(2) with `MCL_FUTURE` shows in new mappings only: madvise(2) refuses to discard pages of
/// a locked one.
fn ask_of_future_mappings(probe: u64) -> [Call; PROBES] {
    let bytes = 4096;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    [
        Call::new(libc::SYS_mmap, &[probe, bytes, 0, flags as u64, u64::MAX, 0]),
        Call::new(libc::SYS_madvise, &[probe, bytes, libc::MADV_DONTNEED as u64]),
        Call::new(libc::SYS_munlock, &[probe, bytes]),
        Call::new(libc::SYS_madvise, &[probe, bytes, libc::MADV_DONTFORK as u64]),
    ]
}

/// What came of it. Where there is no room for another locked page, the first call fails.
fn are_future_locked(calls: &[Call]) -> bool {
    calls[0].result == i64::from(-libc::EAGAIN) || calls[1].result == i64::from(-libc::EINVAL)
}

/// Answers of [`ask`].
#[derive(Clone, Debug, Default)]
pub struct Answers {
    signal_actions: Vec<SignalAction>,
    interval_timers: [IntervalTimer; 3],
    child_subreaper: bool,
    dumpable: u8,
    thp_disabled: bool,
    membarrier: u32,
    brk: u64,
    lock_future: bool,
    personality: u32,
    posix_timers: Vec<PosixTimer>,
}

impl Answers {
    /// Reads them from the stub's memory.
    pub fn read(
        calls: &[Call],
        timers: &[TimerLine],
        stub: &Stub,
        offset: usize,
    ) -> ObjectResult<Self> {
        let word = |at: usize| stub.memory().read_u64(offset + at);
        let mut all = Self::default();
        for (signal, call) in calls[..SIGNALS].iter().enumerate() {
            call.value("read signal action")?;
            let at = signal * ACTION_BYTES;
            all.signal_actions.push(SignalAction {
                handler: word(at),
                flags: word(at + 8),
                restorer: word(at + 16),
                mask: word(at + 24),
            });
        }
        for (index, timer) in all.interval_timers.iter_mut().enumerate() {
            calls[SIGNALS + index].value("read interval timer")?;
            let at = ITIMERS_AT + index * TIMER_BYTES;
            timer.interval_us = word(at) * 1_000_000 + word(at + 8);
            timer.value_us = word(at + 16) * 1_000_000 + word(at + 24);
        }
        let rest = &calls[SIGNALS + 3..];
        rest[0].value("read child subreaper")?;
        all.child_subreaper = word(SUBREAPER_AT) & 0xffff_ffff != 0;
        all.dumpable = rest[1].value("read dumpable flag")? as u8;
        all.thp_disabled = rest[2].value("read huge page flag")? != 0;
        // Kernels before 6.3 do not tell.
        all.membarrier = rest[3].value("read membarrier registrations").unwrap_or(0) as u32;
        all.brk = rest[4].value("read program break")?;
        all.personality = rest[5].value("read personality")? as u32;
        all.lock_future = are_future_locked(&rest[6..]);
        for (index, line) in timers.iter().enumerate() {
            let calls = &calls[FIXED_CALLS + 2 * index..];
            calls[0].value("read timer")?;
            let at = TIMERS_AT + index * TIMER_BYTES;
            all.posix_timers.push(PosixTimer {
                id: line.id,
                clock: line.clock,
                notify: line.notify,
                signal: line.signal,
                value: line.value,
                thread: line.thread,
                interval_ns: word(at) * 1_000_000_000 + word(at + 8),
                value_ns: word(at + 16) * 1_000_000_000 + word(at + 24),
                overrun: calls[1].value("read timer overrun").unwrap_or(0) as i32,
            });
        }
        Ok(all)
    }

    /// Whether the process would answer the same if it has executed nothing since.
    pub fn last(&self) -> bool {
        let armed = |timer: &IntervalTimer| timer.value_us > 0;
        self.posix_timers.is_empty() && !self.interval_timers.iter().any(armed)
    }

    /// Fills in what they say about the process and its memory.
    pub fn describe(self, process: &mut LiveProcess, layout: &mut Layout) {
        process.signal_actions = self.signal_actions;
        process.interval_timers = self.interval_timers;
        process.child_subreaper = self.child_subreaper;
        process.personality = self.personality;
        process.posix_timers = self.posix_timers;
        layout.dumpable = self.dumpable;
        layout.thp_disabled = self.thp_disabled;
        layout.membarrier = self.membarrier;
        layout.lock_future = self.lock_future;
        layout.words[5] = self.brk;
    }
}

/// A POSIX timer as `/proc/PID/timers` shows it (proc(5)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimerLine {
    id: i32,
    signal: i32,
    value: u64,
    notify: i32,
    thread: GuestPid,
    clock: i32,
}

/// Reads the POSIX timers of a process.
pub fn posix_timers(pid: HostPid, file: &mut KeptFile) -> ObjectResult<Vec<TimerLine>> {
    let mut text = Vec::new();
    file.read("read timers (CONFIG_CHECKPOINT_RESTORE is needed)", &mut text)?;
    let text = String::from_utf8_lossy(&text);
    let mut timers: Vec<TimerLine> = Vec::new();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        if key == "ID" {
            let id = value.parse().unwrap_or(0);
            timers.push(TimerLine { id, ..TimerLine::default() });
            continue;
        }
        let Some(timer) = timers.last_mut() else { continue };
        match key {
            "signal" => {
                let (signal, data) = value.split_once('/').unwrap_or((value, "0"));
                timer.signal = signal.parse().unwrap_or(0);
                timer.value = u64::from_str_radix(data.trim_start_matches("0x"), 16).unwrap_or(0);
            }
            "notify" => notify(pid, value, timer),
            "ClockID" => timer.clock = value.parse().unwrap_or(0),
            _ => {}
        }
    }
    if timers.len() > TIMERS_MAX {
        return Err(ObjectError::refused(
            format!("process {pid}"),
            format!("it has {} POSIX timers; {TIMERS_MAX} can be carried", timers.len()),
        ));
    }
    Ok(timers)
}

/// `signal/tid.17`, `none/pid.4`, `thread/pid.4`: the number is the host's.
fn notify(reader: HostPid, value: &str, timer: &mut TimerLine) {
    let (kind, target) = value.split_once('/').unwrap_or((value, ""));
    let (whom, number) = target.split_once('.').unwrap_or(("", "0"));
    timer.notify = match kind {
        "signal" => libc::SIGEV_SIGNAL,
        "none" => libc::SIGEV_NONE,
        _ => libc::SIGEV_THREAD,
    };
    if whom == "tid" {
        timer.notify |= libc::SIGEV_THREAD_ID;
    }
    let host = number.parse().unwrap_or(reader.0);
    let inner = thread_info::status(HostPid(host)).map_or(0, |status| status.inner_tid);
    timer.thread = GuestPid(inner);
}

/// Signals that wait for a process, all of whose threads stand still.
pub fn pending(pid: HostPid, status: &Status) -> ObjectResult<Vec<QueuedSignal>> {
    if status.pending[1] == 0 {
        return Ok(Vec::new());
    }
    let queued = ptrace::queued_signals(pid, true)?;
    Ok(queued.into_iter().map(|info| QueuedSignal { siginfo: info.to_vec() }).collect())
}

/// What is read of a process from outside, also while its threads run calls of ours.
pub fn outside(
    pid: HostPid,
    status: &Status,
    oom_score: &mut KeptFile,
) -> ObjectResult<LiveProcess> {
    Ok(LiveProcess {
        limits: thread_info::limits(pid)?,
        umask: status.umask,
        cwd: link(pid, "cwd")?,
        root: link(pid, "root")?,
        oom_score_adj: read_number(oom_score)?,
        ..LiveProcess::default()
    })
}

/// Where a link of `/proc/PID` points.
pub fn link(pid: HostPid, what: &str) -> ObjectResult<HostPath> {
    let target = std::fs::read_link(format!("/proc/{pid}/{what}"))
        .map_err(KernelError::io("read process link"))?;
    let target = target.into_os_string().into_string().map_err(|path| {
        ObjectError::refused(format!("path {path:?}"), "it is not UTF-8; rename it")
    })?;
    Ok(HostPath(target))
}

fn read_number(file: &mut KeptFile) -> ObjectResult<i32> {
    let mut text = Vec::new();
    file.read("read process number", &mut text)?;
    Ok(String::from_utf8_lossy(&text).trim().parse().unwrap_or(0))
}

/// Code, data, stack, argument and environment addresses, and the auxiliary vector.
pub fn layout(pid: HostPid) -> ObjectResult<Layout> {
    // Field numbers of proc(5) less four, since `stat` starts at the parent's number.
    let stat = thread_info::stat(pid)?;
    let field = |number: usize| stat.get(number - 4).copied().unwrap_or(0);
    let words = [
        field(26),
        field(27),
        field(45),
        field(46),
        field(47),
        0,
        field(28),
        field(48),
        field(49),
        field(50),
        field(51),
    ];
    let auxv = std::fs::read(format!("/proc/{pid}/auxv"))
        .map_err(KernelError::io("read auxiliary vector"))?;
    Ok(Layout { words, auxv, ..Layout::default() })
}
