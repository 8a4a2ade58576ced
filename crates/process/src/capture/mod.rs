//! Capture: from a running guest to a [`Checkpoint`] and runs of pages.
//!
//! The road of an epoch: [`Guest::prepare`] makes new processes ready, [`Guest::precopy`] copies
//! what was written while the guest runs, [`Guest::checkpoint`] stops it, takes the rest and lets
//! it go on. Encoding, compressing and sending are others' work, after the resume.

mod anonymous;
pub(crate) mod asleep;
pub(crate) mod known;
pub mod mappings;
pub mod objects;
pub mod processes;
pub mod ranges;
pub(crate) mod rest;
pub mod shared;
pub mod space;
pub mod threads;
pub mod touch;
mod tree;
mod wave;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use hotspare_image::Checkpoint;
use hotspare_image::tree::GuestPid;
use hotspare_kernel::remote::{Call, Stub, vdso_syscall};
use hotspare_kernel::userfaultfd::WriteTracker;
use hotspare_kernel::{HostPid, pidfd, proc_maps};

use crate::guest::Guest;
use crate::objects::error::{ObjectError, ObjectResult};
use crate::pages::PageRun;
use shared::SharedTable;
use space::Space;

pub use known::prepare_marks;
pub use mappings::ProcessCache;

/// The pause, in its named parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct PauseParts {
    /// Until the last thread stood still.
    pub stop: Duration,
    /// Reading mappings and page tables.
    pub scan: Duration,
    /// Copying the remaining pages.
    pub copy: Duration,
    /// Registers and everything else of threads and processes.
    pub registers: Duration,
    /// Descriptors and what they point at, as far as they were not ready by then.
    pub objects: Duration,
    /// What the caller did meanwhile (cut of the file changes).
    pub files: Duration,
    /// Until the last thread ran again.
    pub resume: Duration,
    /// All of it.
    pub total: Duration,
}

/// What [`Guest::checkpoint`] brings home.
#[derive(Debug)]
pub struct Captured {
    /// Everything but pages; `position` and `term` are the caller's to fill in.
    pub checkpoint: Checkpoint,
    /// Pages copied while the guest stood still.
    pub runs: Vec<PageRun>,
    /// How long what took.
    pub parts: PauseParts,
}

/// Without `UFFD_USER_MODE_ONLY` the call needs privilege, which the guest may have given up.
/// Faults of the kernel are tracked all the same: nobody is asked about them (`WP_ASYNC`).
const UFFD_FLAGS: u64 = libc::O_CLOEXEC as u64 | 1;

impl Guest {
    /// Whether some process has not been made ready yet.
    pub fn needs_preparation(&self) -> bool {
        self.processes.values().any(|process| process.space.is_none())
    }

    /// Stops the guest for as long as it takes to put the stub and write tracking into processes
    /// that do not have them, and into mappings that [`Guest::scan`] has left untracked, and scans
    /// the memory of these processes.
    pub fn prepare(&mut self) -> ObjectResult<()> {
        self.must_be_loaded()?;
        self.stop_all()?;
        let prepared = self.prepare_stopped().and_then(|()| self.track_stopped());
        match self.resume_all()? {
            false if prepared.is_err() => {
                Err(ObjectError::transient("a thread", "was killed while it was made ready"))
            }
            _ => prepared,
        }
    }

    fn prepare_stopped(&mut self) -> ObjectResult<()> {
        let new: Vec<HostPid> = self
            .processes
            .values()
            .filter(|process| process.space.is_none())
            .map(|process| process.pid)
            .collect();
        for pid in new {
            self.prepare_process(pid)?;
            self.scan_process(pid, true)?;
        }
        Ok(())
    }

    /// Begins to track what a scan of the running guest has left.
    fn track_stopped(&mut self) -> ObjectResult<()> {
        let is_left = |space: &Space| space.untracked_pages > 0;
        let left = self.processes.values();
        let left = left.filter(|process| process.space.as_ref().is_some_and(is_left));
        for pid in left.map(|process| process.pid).collect::<Vec<_>>() {
            self.scan_process(pid, true)?;
        }
        Ok(())
    }

    fn prepare_process(&mut self, pid: HostPid) -> ObjectResult<()> {
        let id = self.fresh_mm();
        let tid = self.visitable_thread(pid)?;
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(()) };
        if process.borrows_memory {
            return Err(ObjectError::refused(
                format!("process {}", process.guest_pid),
                "it shares its memory with another process (clone(2) with CLONE_VM)",
            ));
        }
        let mut lines = Vec::new();
        proc_maps::read(pid, &mut Vec::new(), &mut lines)?;
        let instruction = vdso_syscall(pid, &lines)?;
        let stub = match process.stub.take() {
            Some(stub) => stub,
            None => Stub::inject(tid, process.pidfd.as_fd(), &lines, instruction)?,
        };
        let mut calls = [Call::new(libc::SYS_userfaultfd, &[UFFD_FLAGS])];
        stub.run(tid, 0, &mut calls)?;
        let fd = calls[0].value("create userfaultfd in the guest")?;
        let taken = pidfd::get_fd(process.pidfd.as_fd(), fd as i32);
        stub.run(tid, 0, &mut [Call::new(libc::SYS_close, &[fd])])?;
        let tracker = WriteTracker::new(taken?)?;
        process.space = Some(Space::new(id, pid, tracker, stub.range())?);
        process.stub = Some(stub);
        Ok(())
    }

    fn scan_process(&mut self, pid: HostPid, stopped: bool) -> ObjectResult<()> {
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(()) };
        let Some(space) = process.space.as_mut() else { return Ok(()) };
        space.scan(stopped)?;
        self.shared.take_written(pid, space)
    }

    /// Pages found written and not copied yet.
    pub fn backlog_pages(&self) -> u64 {
        let private = self.processes.values().filter_map(|process| process.space.as_ref());
        private.map(Space::backlog_pages).sum::<u64>() + self.shared.backlog_pages()
    }

    /// Pages of private memory with content.
    pub fn populated_pages(&self) -> u64 {
        let private = self.processes.values().filter_map(|process| process.space.as_ref());
        private.map(Space::populated_pages).sum()
    }

    /// Pages with content in mappings that are too new to be tracked, as the last scan of the
    /// running guest found them. [`Guest::prepare`] makes them known before the next checkpoint.
    pub fn untracked_pages(&self) -> u64 {
        let private = self.processes.values().filter_map(|process| process.space.as_ref());
        private.map(|space| space.untracked_pages).sum()
    }

    /// Finds what was written since the last scan, while the guest runs. Processes that end or
    /// call execve meanwhile, and mappings that are not tracked yet, are left to the next stop.
    pub fn scan(&mut self) -> ObjectResult<()> {
        for pid in self.processes().collect::<Vec<_>>() {
            passing(self.scan_process(pid, false))?;
        }
        Ok(())
    }

    /// Finds what was written since the last scan, in the stopped guest; see [`Guest::freeze`].
    pub fn scan_stopped(&mut self) -> ObjectResult<()> {
        for pid in self.processes().collect::<Vec<_>>() {
            self.scan_process(pid, true)?;
        }
        Ok(())
    }

    /// Copies up to `bytes_max` of what was found written into `runs`, while the guest runs.
    pub fn precopy(&mut self, bytes_max: u64, runs: &mut Vec<PageRun>) -> ObjectResult<()> {
        runs.append(&mut self.unsent);
        let copied = self.copy_private(bytes_max);
        self.rest.drain_into(runs);
        copied?;
        self.shared.copy(bytes_max, runs)
    }

    fn copy_private(&mut self, bytes_max: u64) -> ObjectResult<()> {
        for process in self.processes.values_mut() {
            let Some(space) = process.space.as_mut() else { continue };
            passing(space.copy(bytes_max, &mut self.rest))?;
        }
        Ok(())
    }

    /// Lets all pages wait to be copied again, as a spare needs that starts from nothing. For the
    /// other spares the next checkpoint is an increment as any other.
    pub fn copy_again(&mut self) {
        for process in self.processes.values_mut() {
            if let Some(space) = process.space.as_mut() {
                space.copy_again();
            }
        }
        self.shared.copy_again();
    }

    /// Stops the guest, takes what changed since the last checkpoint, lets it go on.
    ///
    /// `during` runs while the guest stands still. On failure the guest runs on, and what was
    /// found written stays in the backlog for the next attempt. One to be held
    /// ([`Guest::hold_after_checkpoint`]) stands still after success. If more than `backlog_max`
    /// pages are to be copied, the guest is let go at once and `None` returned: pre-copy again.
    pub fn checkpoint(
        &mut self,
        backlog_max: u64,
        rules: &mut CheckpointRules<'_>,
        during: &mut dyn FnMut() -> ObjectResult<()>,
    ) -> ObjectResult<Option<Captured>> {
        self.must_be_loaded()?;
        let begin = Instant::now();
        let mut parts = PauseParts::default();
        self.stop_all()?;
        if !self.is_alive() {
            // It may have been killed, and go on elsewhere from the checkpoint before.
            return Err(ObjectError::transient("the guest", "has ended"));
        }
        parts.stop = begin.elapsed();
        let captured = self.checkpoint_stopped(backlog_max, rules, during, &mut parts);
        rules.objects.end();
        self.seen.clear();
        for space in self.processes.values_mut().filter_map(|process| process.space.as_mut()) {
            space.mappings_now = None;
            space.maps.lock().unwrap_or_else(PoisonError::into_inner).forget_ahead();
        }
        let resume = Instant::now();
        let may_stay = self.stays_held && matches!(captured, Ok(Some(_)));
        let stood_still = if may_stay && matches!(self.all_stand_still(), Ok(true)) {
            (self.stays_held, self.held) = (false, true);
            Ok(true)
        } else {
            self.resume_all()
        };
        parts.resume = resume.elapsed();
        parts.total = begin.elapsed();
        self.rest.drain_into(&mut self.unsent);
        if !stood_still? {
            // Whatever was found in what is being torn down, errors too, means nothing.
            return Err(ObjectError::transient("a thread", "was killed during the checkpoint"));
        }
        let Some(mut captured) = captured? else { return Ok(None) };
        self.commit_round();
        rules.objects.complete(&mut captured.checkpoint);
        captured.runs = std::mem::take(&mut self.unsent);
        captured.parts = parts;
        Ok(Some(captured))
    }

    fn checkpoint_stopped(
        &mut self,
        backlog_max: u64,
        rules: &mut CheckpointRules<'_>,
        during: &mut dyn FnMut() -> ObjectResult<()>,
        parts: &mut PauseParts,
    ) -> ObjectResult<Option<Captured>> {
        let mut clock = Lap::start();
        self.prepare_stopped()?;
        self.look_at_marks();
        rules.objects.begin(self);
        // Threads run calls of ours here, and the kernel may write their processor number into
        // their memory then: the scan comes after it.
        let mut checkpoint = self.capture_tree()?;
        parts.registers = clock.lap();
        self.shared.begin_round();
        self.flush_stopped()?;
        self.scan_stopped()?;
        if rules.copy_all {
            self.copy_again();
        }
        parts.scan = clock.lap();
        if self.backlog_pages() > backlog_max {
            return Ok(None);
        }
        self.capture_objects(rules, &mut checkpoint)?;
        self.capture_spaces(&mut checkpoint)?;
        self.shared.scan(&mut self.unsent)?;
        checkpoint.shared = self.shared.describe();
        parts.objects = clock.lap();
        // What is copied stays with the guest: if something fails, the next attempt sends it.
        self.copy_private(u64::MAX)?;
        self.shared.copy(u64::MAX, &mut self.unsent)?;
        parts.copy = clock.lap();
        during()?;
        parts.files = clock.lap();
        Ok(Some(Captured { checkpoint, runs: Vec::new(), parts: PauseParts::default() }))
    }

    /// Stops the guest, runs `look`, lets it go on.
    pub fn freeze<T>(&mut self, look: impl FnOnce(&mut Self) -> T) -> ObjectResult<T> {
        self.stop_all()?;
        let seen = look(self);
        self.resume_all()?;
        Ok(seen)
    }

    /// Describes the stopped guest without descriptors, and without taking anything as told; only
    /// within [`Guest::freeze`].
    pub fn describe_stopped(&mut self) -> ObjectResult<Checkpoint> {
        self.prepare_stopped()?;
        let mut checkpoint = self.capture_tree()?;
        self.capture_spaces(&mut checkpoint)?;
        Ok(checkpoint)
    }

    /// Host number of a process of the guest.
    pub fn host_pid(&self, pid: GuestPid) -> Option<HostPid> {
        let mut all = self.processes.values();
        all.find(|process| process.guest_pid == pid).map(|process| process.pid)
    }

    /// A pidfd of a process of the guest.
    pub fn pidfd(&self, host: HostPid) -> Option<BorrowedFd<'_>> {
        self.processes.get(&host).map(|process| process.pidfd.as_fd())
    }

    /// What was told as new has been told.
    fn commit_round(&mut self) {
        self.shared.end_round();
        for process in self.processes.values_mut() {
            if let Some(space) = process.space.as_mut() {
                space.fresh.clear();
                space.reset = false;
            }
        }
    }

    fn capture_spaces(&mut self, checkpoint: &mut Checkpoint) -> ObjectResult<()> {
        for process in self.processes.values_mut() {
            let space = mappings::describe(process, &mut self.shared)?;
            checkpoint.spaces.push(space);
        }
        Ok(())
    }
}

/// Captures kernel objects of the stopped guest.
pub trait Objects {
    /// The guest stands still; nothing has been captured yet. What another thread can do may
    /// begin.
    fn begin(&mut self, _guest: &Guest) {}

    /// Enters descriptors and IPC into the checkpoint, and tells the table of shared memory which
    /// of it they lead to.
    fn take(
        &mut self,
        guest: &Guest,
        shared: &mut SharedTable,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()>;

    /// The guest is about to go on, whatever came of it: nobody may look at it any more.
    fn end(&mut self) {}

    /// The guest goes on: enters what was not worth its time.
    fn complete(&mut self, _checkpoint: &mut Checkpoint) {}
}

impl<F> Objects for F
where
    F: FnMut(&Guest, &mut SharedTable, &mut Checkpoint) -> ObjectResult<()>,
{
    fn take(
        &mut self,
        guest: &Guest,
        shared: &mut SharedTable,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()> {
        self(guest, shared, checkpoint)
    }
}

/// What the capture must know of the world around the guest.
pub struct CheckpointRules<'a> {
    /// Captures descriptors; see `objects::table`.
    pub objects: &'a mut dyn Objects,
    /// Copies every page, written or not.
    pub copy_all: bool,
}

/// Of a running guest, processes that went away meanwhile are no error.
pub(crate) fn passing(result: ObjectResult<()>) -> ObjectResult<()> {
    match result {
        Err(error) if error.is_transient() => Ok(()),
        other => other,
    }
}

/// Measures consecutive stretches of time.
struct Lap(Instant);

impl Lap {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let lap = now - self.0;
        self.0 = now;
        lap
    }
}
