//! The running guest: every thread of it, seized by one OS thread of ours.
//!
//! [`Guest`] keeps a register of processes and threads and follows ptrace(2) events. While the
//! guest runs, [`Guest::pump`] must be called often: a thread with an event waits for it.
//!
//! ```text
//!            interrupt, await                     resume
//!  running ───────────────────▶ Stopped guest ────────────▶ running
//!     ▲  ▲ pump(): pass signals on, note births, execs, ends     │
//!     │  └────────────────────────────────────────────────────── ┘
//! ```

mod register;
mod stop;
pub(crate) mod waits;

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotspare_image::memory::MmId;
use hotspare_kernel::HostPid;
use hotspare_kernel::marks::Seen;
use hotspare_kernel::news::News;
use hotspare_kernel::ptrace::{self, Stop, Waited, Whose};

use crate::capture::prepare_marks;
use crate::capture::rest::Rest;
use crate::capture::shared::SharedTable;
use crate::lazy::LoaderProgress;
use crate::objects::error::{ObjectError, ObjectResult};
use crate::pages::PageRun;
pub(crate) use register::SeenRestart;
pub use register::{Ended, Process, Thread};
pub use stop::Held;
use waits::Next;
pub(crate) use waits::{SYSCALL_BYTES, restart_of};

/// A process tree under our hand.
#[derive(Debug)]
pub struct Guest {
    pub(crate) processes: BTreeMap<HostPid, Process>,
    pub(crate) threads: BTreeMap<HostPid, Thread>,
    /// Ended processes their parents may not have waited for yet.
    pub(crate) ended: BTreeMap<HostPid, Ended>,
    pub(crate) shared: SharedTable,
    /// Runs of a checkpoint that failed after they were made.
    pub(crate) unsent: Vec<PageRun>,
    pub(crate) rest: Rest,
    /// The guest is not let go after the next checkpoint.
    pub(crate) stays_held: bool,
    /// It was not.
    pub(crate) held: bool,
    news: News,
    root: HostPid,
    /// The root has executed the program: what it has in memory and open is the guest's.
    root_executed: bool,
    root_status: Option<i32>,
    /// When the first wait that was made again is late.
    kick: Option<Instant>,
    next_mm: u32,
    /// Stops given up since the last good one, because a thread was in vfork(2).
    vfork_refusals: u32,
    /// Memory that is still coming.
    loading: Option<Arc<LoaderProgress>>,
    /// Marks of this stop, by process.
    pub(crate) seen: BTreeMap<HostPid, Seen>,
    pub(crate) marks_text: Vec<u8>,
    /// Processors forget its page tables at the next checkpoint.
    pub(crate) flushes: bool,
}

impl Guest {
    /// Takes the single-threaded process `root`, which must not run code of its own yet, and all
    /// it will ever fork. Must be called by the thread that will own the guest.
    pub fn seize(root: HostPid) -> ObjectResult<Self> {
        prepare_marks();
        ptrace::seize(root)?;
        let mut guest = Self::empty(root)?;
        guest.register(root)?;
        Ok(guest)
    }

    /// Takes over a tree whose threads the calling thread already traces, all of them stopped or
    /// running: the ghost that has been let go. `root` is the process whose end ends the guest.
    pub fn adopt(root: HostPid, threads: &[HostPid]) -> ObjectResult<Self> {
        let mut guest = Self::empty(root)?;
        for tid in threads {
            guest.register(*tid)?;
        }
        guest.find_zombies()?;
        Ok(guest)
    }

    fn empty(root: HostPid) -> ObjectResult<Self> {
        Ok(Self {
            processes: BTreeMap::new(),
            threads: BTreeMap::new(),
            ended: BTreeMap::new(),
            shared: SharedTable::default(),
            unsent: Vec::new(),
            rest: Rest::default(),
            stays_held: false,
            held: false,
            news: News::new()?,
            root,
            root_executed: false,
            root_status: None,
            kick: None,
            next_mm: 1,
            vfork_refusals: 0,
            loading: None,
            seen: BTreeMap::new(),
            marks_text: Vec::new(),
            flushes: false,
        })
    }

    /// Its memory is still being loaded. Until it is there, writes to it cannot be tracked, and
    /// checkpoints answer that it is too early.
    pub fn is_loading(&mut self, progress: Arc<LoaderProgress>) {
        self.loading = Some(progress);
    }

    pub(crate) fn must_be_loaded(&mut self) -> ObjectResult<()> {
        self.loading.take_if(|loading| loading.is_done());
        match self.loading {
            None => Ok(()),
            Some(_) => Err(ObjectError::transient("the guest's memory", "is still being loaded")),
        }
    }

    /// Whether any process is left.
    pub fn is_alive(&self) -> bool {
        !self.processes.is_empty()
    }

    /// wait(2) status of the program, once it has ended.
    pub fn root_status(&self) -> Option<i32> {
        self.root_status
    }

    /// wait(2) status of a process that has ended, if its parent may still ask for it.
    pub fn status_of(&self, ended: HostPid) -> Option<i32> {
        self.ended.get(&ended).map(|ended| ended.status)
    }

    /// Host numbers of the living processes.
    pub fn processes(&self) -> impl Iterator<Item = HostPid> + '_ {
        self.processes.keys().copied()
    }

    /// Number of living threads.
    pub fn thread_count(&self) -> usize {
        self.threads.len()
    }

    pub(crate) fn fresh_mm(&mut self) -> MmId {
        let id = MmId(self.next_mm);
        self.next_mm += 1;
        id
    }

    /// Handles what there is to handle, then waits up to `limit` for more, for one of `others` to
    /// become readable, or for the guest's end. Returns which of `others` are readable.
    pub fn pump(&mut self, others: &[BorrowedFd<'_>], limit: Duration) -> ObjectResult<Vec<bool>> {
        let deadline = Instant::now() + limit;
        loop {
            while self.pump_one()? {}
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.is_alive() {
                return Ok(self.news.wait(others, Duration::ZERO)?);
            }
            self.kick_late()?;
            let until_kick = self.kick.map(|kick| kick.saturating_duration_since(Instant::now()));
            let left = until_kick.map_or(left, |until| left.min(until));
            let readable = self.news.wait(others, left)?;
            if readable.contains(&true) {
                while self.pump_one()? {}
                return Ok(readable);
            }
        }
    }

    /// Handles events until the root has executed its program; false if it has ended without.
    /// Before that it is a copy of our init, with descriptors of ours.
    pub fn await_program(&mut self) -> ObjectResult<bool> {
        while !self.root_executed && self.is_alive() {
            self.pump(&[], Duration::from_millis(20))?;
        }
        Ok(self.root_executed)
    }

    /// Handles one event of the running guest; false if there was none.
    fn pump_one(&mut self) -> ObjectResult<bool> {
        match ptrace::wait(Whose::Any, false)? {
            Waited::Nothing | Waited::NoChildren => Ok(false),
            Waited::Ended(tid, status) => {
                self.note_end(tid, status);
                Ok(true)
            }
            Waited::Stopped(tid, stop) => {
                self.note_stop(tid, stop)?;
                self.go_on(tid, stop)?;
                Ok(true)
            }
        }
    }

    /// Lets a thread go on from a stop that is no business of ours.
    fn go_on(&mut self, tid: HostPid, stop: Stop) -> ObjectResult<()> {
        match stop {
            Stop::Signal(signal) => self.settle(tid, Next::Signal(signal))?,
            Stop::Interrupted => self.settle(tid, Next::GoOn)?,
            Stop::Group(_)
            | Stop::Born { .. }
            | Stop::VforkDone
            | Stop::Exec { .. }
            | Stop::Exiting { .. }
            | Stop::Syscall => {}
        }
        gone_is_fine(match stop {
            Stop::Signal(signal) => ptrace::cont(tid, signal),
            Stop::Group(_) => ptrace::listen(tid),
            Stop::Interrupted
            | Stop::Born { .. }
            | Stop::VforkDone
            | Stop::Exec { .. }
            | Stop::Exiting { .. }
            | Stop::Syscall => ptrace::cont(tid, 0),
        })
    }

    /// Whether the guest stands still after the next checkpoint that succeeds, until
    /// [`Guest::thaw`].
    pub fn hold_after_checkpoint(&mut self, hold: bool) {
        self.stays_held = hold;
    }

    /// Whether the guest stands still after such a checkpoint.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Lets the guest go on that was held after a checkpoint.
    pub fn thaw(&mut self) -> ObjectResult<()> {
        self.held = false;
        self.resume_all().map(drop)
    }

    /// Ends every process of the guest with SIGKILL.
    pub fn kill(&self) {
        for pid in self.processes.keys() {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid.0),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
    }
}

/// A thread that died meanwhile is an ordinary answer: its end will be reported.
pub(crate) fn gone_is_fine(result: hotspare_kernel::Result<()>) -> ObjectResult<()> {
    was_there(result).map(drop)
}

/// Whether whom the call was about was there.
fn was_there(result: hotspare_kernel::Result<()>) -> ObjectResult<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.is_died() => Ok(false),
        Err(error) => Err(error.into()),
    }
}
