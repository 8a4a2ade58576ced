//! What belongs to a process as a whole: signal actions, directories, limits, timers.

use std::os::fd::AsRawFd;
use std::os::fd::BorrowedFd;

use hotspare_image::memory::Layout;
use hotspare_image::tree::{ClockReading, LiveProcess, PosixTimer};
use hotspare_kernel::remote::{Call, Stub};
use hotspare_kernel::{ptrace, spawn, thread_info};

use super::body::{Body, TOOLS};
use super::error::{GhostError, GhostResult};
use super::hands::Batch;

const PR_SET_MM: u64 = 35;
const PR_SET_MM_MAP: u64 = 14;
const PR_SET_THP_DISABLE: u64 = 41;
const PR_SET_DUMPABLE: u64 = 4;
const PR_TIMER_CREATE_RESTORE_IDS: u64 = 77;

impl Body {
    /// Where program, heap, stack and arguments are, and which program runs. Before descriptors
    /// are placed.
    pub(super) fn set_memory_map(
        &self,
        layout: &Layout,
        exe: Option<BorrowedFd<'_>>,
    ) -> GhostResult<()> {
        let mut batch = self.batch();
        if let Some(exe) = exe {
            let arguments = [TOOLS[0] as u64, exe.as_raw_fd() as u64, 0];
            batch.must("take program", libc::SYS_pidfd_getfd, &arguments);
        }
        let auxv = batch.data(&layout.auxv);
        let mut words = layout.words.to_vec();
        words.push(if layout.auxv.is_empty() { 0 } else { auxv });
        let descriptor = if exe.is_some() { 0u64 } else { u64::from(u32::MAX) };
        words.push(layout.auxv.len() as u64 | descriptor << 32);
        let map = batch.words(&words);
        let bytes = words.len() as u64 * 8;
        let arguments = [PR_SET_MM, PR_SET_MM_MAP, map, bytes, 0];
        batch.must("set memory map", libc::SYS_prctl, &arguments);
        if exe.is_some() {
            batch.must("close program", libc::SYS_close, &[0]);
        }
        // A new address space has inherited this from its parent's.
        let disabled = [PR_SET_THP_DISABLE, layout.thp_disabled.into(), 0, 0, 0];
        batch.must("disable huge pages", libc::SYS_prctl, &disabled);
        for bit in 0..32 {
            let command = 1u64 << bit;
            if u64::from(layout.membarrier) & command != 0 {
                batch.must("register membarrier", libc::SYS_membarrier, &[command, 0, 0]);
            }
        }
        batch.run()?;
        Ok(())
    }

    /// umask, directories, personality; the subreaper flag is there.
    pub(super) fn set_attributes(&mut self, live: &LiveProcess) -> GhostResult<()> {
        if self.subreaper != live.child_subreaper {
            return Err(GhostError::Image("the subreaper flag was not applied".into()));
        }
        let mut batch = self.batch();
        batch.room(2 * 4096 + 64, 8)?;
        batch.must("set umask", libc::SYS_umask, &[live.umask.into()]);
        let cwd = batch.text(live.cwd.0.as_bytes());
        batch.must("enter working directory", libc::SYS_chdir, &[cwd]);
        if live.root.0 != "/" && !live.root.0.is_empty() {
            let root = batch.text(live.root.0.as_bytes());
            batch.must("enter root directory", libc::SYS_chroot, &[root]);
        }
        batch.must("set personality", libc::SYS_personality, &[live.personality.into()]);
        batch.run()?;
        if live.oom_score_adj != 0 {
            let path = format!("/proc/{}/oom_score_adj", self.host);
            std::fs::write(path, live.oom_score_adj.to_string())
                .map_err(GhostError::io("set oom_score_adj"))?;
        }
        Ok(())
    }

    /// The action of SIGTRAP, where the stub's own stops would undo it: the call that sets it.
    pub(super) fn trap_action(&self, live: &LiveProcess) -> Option<Call> {
        let action = live.signal_actions.get(libc::SIGTRAP as usize - 1)?;
        if action.handler != 1 {
            return None;
        }
        let words = [action.handler, action.flags, action.restorer, action.mask];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.hands.stub.memory().write(Stub::scratch_offset(1), &bytes);
        let arguments = [libc::SIGTRAP as u64, self.hands.stub.scratch(1), 0, 8];
        Some(Call::new(libc::SYS_rt_sigaction, &arguments))
    }

    /// Resource limits, from outside.
    pub(super) fn set_limits(&self, live: &LiveProcess) -> GhostResult<()> {
        let now = thread_info::limits(self.host)?;
        for ((resource, wanted), now) in (0u32..).zip(&live.limits).zip(now) {
            if *wanted != now {
                spawn::set_limit(self.host, resource, wanted.0, wanted.1)?;
            }
        }
        Ok(())
    }

    /// Interval and POSIX timers: as late as possible, since they run at once.
    /// `now` are the guest's clocks.
    pub(super) fn start_timers(&self, live: &LiveProcess, now: ClockReading) -> GhostResult<()> {
        let mut batch = self.batch();
        for (which, timer) in (0u64..).zip(live.interval_timers) {
            // A periodic timer whose signal is pending is not armed; taking the signal arms it.
            let value_us = match timer.value_us {
                0 => u64::from(timer.interval_us != 0),
                value_us => value_us,
            };
            if value_us != 0 {
                let split = |us: u64| [us / 1_000_000, us % 1_000_000];
                let words = [split(timer.interval_us), split(value_us)].concat();
                let at = batch.words(&words);
                batch.must("start interval timer", libc::SYS_setitimer, &[which, at, 0]);
            }
        }
        if !live.posix_timers.is_empty() {
            let switch = |on| [PR_TIMER_CREATE_RESTORE_IDS, on, 0, 0, 0];
            batch.must("choose timer numbers (Linux 6.15)", libc::SYS_prctl, &switch(1));
            for timer in &live.posix_timers {
                batch.room(256, 2)?;
                let pending = is_pending(live, timer);
                add_timer(&mut batch, timer, pending.then_some(now));
            }
            batch.room(0, 1)?;
            batch.must("stop choosing timer numbers", libc::SYS_prctl, &switch(0));
        }
        batch.run()?;
        Ok(())
    }

    /// Last of what concerns memory: our own mappings are not to be locked.
    pub(super) fn lock_future(&self, layout: &Layout) -> GhostResult<()> {
        if layout.lock_future {
            let future = libc::MCL_FUTURE as u64;
            self.batch().ask("lock future memory", libc::SYS_mlockall, &[future])?;
        }
        Ok(())
    }

    /// Whether others may look into the process; after credentials, which reset it.
    pub(super) fn set_dumpable(&self, layout: &Layout) -> GhostResult<()> {
        if layout.dumpable < 2 {
            let arguments = [PR_SET_DUMPABLE, layout.dumpable.into(), 0, 0, 0];
            self.batch().ask("set dumpable", libc::SYS_prctl, &arguments)?;
        }
        Ok(())
    }

    /// Drops signals that the building of the ghost left behind, such as SIGCHLD.
    pub(super) fn drop_signals(&self) -> GhostResult<()> {
        for (_, host) in &self.threads {
            let pending = ptrace::queued_signals(*host, false)?.len()
                + ptrace::queued_signals(*host, true)?.len();
            let mut batch = self.hands.batch(*host);
            for _ in 0..pending {
                batch.room(32, 1)?;
                let all = batch.words(&[u64::MAX, 0, 0]);
                batch.may(libc::SYS_rt_sigtimedwait, &[all, 0, all + 8, 8]);
            }
            batch.run()?;
        }
        Ok(())
    }

    /// Signals pending for the process as a whole.
    pub(super) fn queue_signals(&self, live: &LiveProcess) -> GhostResult<()> {
        let mut batch = self.batch();
        for signal in &live.pending {
            let info = siginfo(&signal.siginfo)?;
            if is_from_timer(live, info) {
                continue;
            }
            batch.room(160, 1)?;
            let at = batch.data(info);
            let arguments = [self.pid.0 as u64, number_of(info), at];
            batch.must("queue signal", libc::SYS_rt_sigqueueinfo, &arguments);
        }
        batch.run()?;
        Ok(())
    }
}

/// `siginfo_t` of the right size.
pub(super) fn siginfo(bytes: &[u8]) -> GhostResult<&[u8; 128]> {
    bytes.try_into().map_err(|_| GhostError::Image(format!("siginfo of {} bytes", bytes.len())))
}

/// The signal's number: the first word of `siginfo_t`.
pub(super) fn number_of(info: &[u8; 128]) -> u64 {
    u64::from(u32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
}

/// Whether the periodic timer's signal is pending. Such a timer's own signal is made anew.
fn is_pending(live: &LiveProcess, timer: &PosixTimer) -> bool {
    let of_threads = live.threads.iter().flat_map(|thread| &thread.pending);
    live.pending
        .iter()
        .chain(of_threads)
        .any(|signal| siginfo(&signal.siginfo).is_ok_and(|info| timer_of(info) == Some(timer.id)))
        && timer.interval_ns != 0
        && clock_now(timer.clock, ClockReading::default()).is_some()
}

/// Whether the pending signal comes from a periodic timer, which sends it again when it is made.
pub(super) fn is_from_timer(live: &LiveProcess, info: &[u8; 128]) -> bool {
    timer_of(info).is_some_and(|id| {
        let mut timers = live.posix_timers.iter();
        timers.any(|timer| timer.id == id && is_pending(live, timer))
    })
}

/// The timer that sent a signal: `si_code` is `SI_TIMER`, `si_timerid` follows the header.
fn timer_of(info: &[u8; 128]) -> Option<i32> {
    const SI_TIMER: i32 = -2;
    let word = |at: usize| i32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    (word(8) == SI_TIMER).then(|| word(16))
}

fn clock_now(clock: i32, now: ClockReading) -> Option<u64> {
    match clock {
        libc::CLOCK_REALTIME => Some(now.realtime_ns),
        libc::CLOCK_MONOTONIC => Some(now.monotonic_ns),
        libc::CLOCK_BOOTTIME => Some(now.boottime_ns),
        _ => None,
    }
}

/// Makes a timer. One whose signal is `pending` is set to an expiry in the past, a period before
/// the next: it sends the signal at once, goes on in phase and counts what it overruns.
fn add_timer(batch: &mut Batch<'_>, timer: &PosixTimer, pending: Option<ClockReading>) {
    const NS: u64 = 1_000_000_000;
    let mut event = [0u64; 8];
    event[0] = timer.value;
    event[1] = u64::from(timer.signal as u32) | u64::from(timer.notify as u32) << 32;
    event[2] = u64::from(timer.thread.0 as u32);
    let event = batch.words(&event);
    let number = batch.words(&[u64::from(timer.id as u32)]);
    let arguments = [timer.clock as i64 as u64, event, number];
    batch.must("make timer", libc::SYS_timer_create, &arguments);
    let interval = timer.interval_ns;
    let past = pending
        .and_then(|now| clock_now(timer.clock, now))
        .map(|now| (now + timer.value_ns % interval.max(1)).saturating_sub(interval).max(1));
    let value = past.unwrap_or(timer.value_ns);
    if value != 0 {
        let flags = if past.is_some() { libc::TIMER_ABSTIME as u64 } else { 0 };
        let times = batch.words(&[interval / NS, interval % NS, value / NS, value % NS]);
        let arguments = [timer.id as u64, flags, times, 0];
        batch.must("start timer", libc::SYS_timer_settime, &arguments);
    }
}
