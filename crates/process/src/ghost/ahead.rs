//! What can be put into a ghost long before it runs, and costs nothing where nothing changed.
//!
//! The kernel acts on none of it while the ghost stands still: names, signal actions, stacks,
//! lists, the program and where its parts are. What was put in is remembered, and forgotten as
//! the kernel forgets it at execve(2).

use std::os::fd::BorrowedFd;

use hotspare_image::memory::{AddressSpace, Layout};
use hotspare_image::tree::{GuestPid, HostPath, LiveProcess, SignalAction, Thread};

use super::body::{Body, TOOLS};
use super::error::GhostResult;
use super::hands::Batch;

const PR_SET_NAME: u64 = 15;
const PR_SET_TIMERSLACK: u64 = 29;
const SS_DISABLE: u64 = 2;
/// `SS_AUTODISARM`, the only flag that can be set.
const SS_AUTODISARM: u64 = 1 << 31;
/// Bytes of `struct robust_list_head`.
const ROBUST_LIST_BYTES: u64 = 24;

/// What a ghost process has of the guest's already.
#[derive(Debug, Default)]
pub(super) struct Dressed {
    threads: Vec<ThreadDress>,
    /// Actions of signals 1…64, as far as known; default behind the end.
    pub(super) actions: Vec<SignalAction>,
    layout: Option<Layout>,
    /// Lowest descriptor number the table has no room for.
    table_room: i32,
    exe: Option<HostPath>,
}

/// Of a thread.
#[derive(Clone, Debug, PartialEq)]
struct ThreadDress {
    tid: GuestPid,
    name: Vec<u8>,
    alternate_stack: [u64; 3],
    robust_list: [u64; 2],
    clear_tid: u64,
    timer_slack_ns: u64,
    io_priority: i32,
}

impl Dressed {
    /// What a process has that was cloned by one with `actions`, or has executed the idle
    /// program: only ignored signals stay.
    pub(super) fn after_exec(actions: &[SignalAction]) -> Self {
        let kept = |action: &SignalAction| match action.handler {
            1 => *action,
            _ => SignalAction::default(),
        };
        Self { actions: actions.iter().map(kept).collect(), ..Self::default() }
    }

    /// Whether the program has still to be set.
    pub(super) fn needs_program(&self, space: &AddressSpace) -> bool {
        self.exe.as_ref() != Some(&space.exe)
    }

    /// Threads that have ended are forgotten: another may get their number.
    pub(super) fn forget_threads(&mut self, alive: &[Thread]) {
        self.threads.retain(|dress| alive.iter().any(|thread| thread.tid == dress.tid));
    }
}

impl From<&Thread> for ThreadDress {
    fn from(thread: &Thread) -> Self {
        Self {
            tid: thread.tid,
            name: thread.name.clone(),
            alternate_stack: thread.alternate_stack,
            robust_list: thread.robust_list,
            clear_tid: thread.clear_tid.0,
            timer_slack_ns: thread.timer_slack_ns,
            io_priority: thread.io_priority,
        }
    }
}

impl Body {
    /// Brings everything that can be put in ahead up to the image. `exe` is the program's file,
    /// where it is to be set.
    pub(super) fn dress_ahead(
        &mut self,
        live: &LiveProcess,
        space: &AddressSpace,
        exe: Option<BorrowedFd<'_>>,
    ) -> GhostResult<()> {
        self.dress_threads(live)?;
        self.make_room(live)?;
        if self.dressed.actions != live.signal_actions {
            self.set_actions(&live.signal_actions)?;
            self.dressed.actions.clone_from(&live.signal_actions);
        }
        if exe.is_some() || self.dressed.layout.as_ref() != Some(&space.layout) {
            self.set_memory_map(&space.layout, exe)?;
            self.dressed.layout = Some(space.layout.clone());
            if exe.is_some() {
                self.dressed.exe = Some(space.exe.clone());
            }
        }
        Ok(())
    }

    fn dress_threads(&mut self, live: &LiveProcess) -> GhostResult<()> {
        for thread in &live.threads {
            let known = self.dressed.threads.iter().position(|dress| dress.tid == thread.tid);
            if known.is_some_and(|index| self.dressed.threads[index].fits(thread)) {
                continue;
            }
            let wanted = ThreadDress::from(thread);
            let mut batch = self.hands.batch(self.thread(thread.tid)?);
            wanted.put_on(&mut batch);
            batch.run()?;
            match known {
                Some(index) => self.dressed.threads[index] = wanted,
                None => self.dressed.threads.push(wanted),
            }
        }
        Ok(())
    }

    /// Growing the descriptor table of a process with several threads takes the kernel
    /// milliseconds (it waits for all processors to let go of the old one).
    fn make_room(&mut self, live: &LiveProcess) -> GhostResult<()> {
        let last = live.descriptors.iter().map(|descriptor| descriptor.fd).max().unwrap_or(0);
        // The tool may have to move behind the last.
        let needed = last + 1;
        if needed < self.dressed.table_room || needed <= TOOLS[1] {
            return Ok(());
        }
        let mut batch = self.batch();
        let flags = libc::O_CLOEXEC as u64;
        let arguments = [TOOLS[0] as u64, needed as u64, flags];
        batch.must("grow descriptor table", libc::SYS_dup3, &arguments);
        batch.must("close descriptor", libc::SYS_close, &[needed as u64]);
        batch.run()?;
        self.dressed.table_room = needed + 1;
        Ok(())
    }

    fn set_actions(&self, wanted: &[SignalAction]) -> GhostResult<()> {
        let mut batch = self.batch();
        for (index, action) in wanted.iter().enumerate() {
            let signal = index as i32 + 1;
            let had = self.dressed.actions.get(index).copied().unwrap_or_default();
            let fixed = signal == libc::SIGKILL || signal == libc::SIGSTOP;
            if fixed || had == *action {
                continue;
            }
            batch.room(64, 1)?;
            let at = batch.words(&[action.handler, action.flags, action.restorer, action.mask]);
            let arguments = [signal as u64, at, 0, 8];
            batch.must("set signal action", libc::SYS_rt_sigaction, &arguments);
        }
        batch.run()?;
        Ok(())
    }
}

impl ThreadDress {
    fn fits(&self, thread: &Thread) -> bool {
        self.name == thread.name
            && self.alternate_stack == thread.alternate_stack
            && self.robust_list == thread.robust_list
            && self.clear_tid == thread.clear_tid.0
            && self.timer_slack_ns == thread.timer_slack_ns
            && self.io_priority == thread.io_priority
    }

    fn put_on(&self, batch: &mut Batch<'_>) {
        let name = batch.text(&self.name);
        batch.must("name thread", libc::SYS_prctl, &[PR_SET_NAME, name, 0, 0, 0]);
        let [sp, flags, size] = self.alternate_stack;
        let stack = if flags & SS_DISABLE == 0 && sp != 0 {
            batch.words(&[sp, flags & SS_AUTODISARM, size])
        } else {
            batch.words(&[0, SS_DISABLE, 0])
        };
        batch.must("set alternate stack", libc::SYS_sigaltstack, &[stack, 0]);
        let list = [self.robust_list[0], ROBUST_LIST_BYTES];
        batch.must("set robust list", libc::SYS_set_robust_list, &list);
        batch.must("set tid address", libc::SYS_set_tid_address, &[self.clear_tid]);
        let slack = [PR_SET_TIMERSLACK, self.timer_slack_ns, 0, 0, 0];
        batch.must("set timer slack", libc::SYS_prctl, &slack);
        batch.may(libc::SYS_ioprio_set, &[1, 0, self.io_priority as u64]);
    }
}
