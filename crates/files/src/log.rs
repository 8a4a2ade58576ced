//! The changes since the last cut.
//!
//! A checkpoint is applied as a whole, so only those orders matter that change its result: the
//! operations on names among themselves, and the content operations of one file among themselves.
//! Names therefore go to one list as they happen; written ranges are kept per file, later ones over
//! earlier ones, and join the list when something else happens to that file's content, or at the
//! cut. Attributes are not logged: the cut reads them, once per touched inode.
//!
//! ```text
//! name operation ─────────────────────────────▶ ordered ─┐
//! write ──▶ pending[inode] ── barrier (truncate, …) ─▶───┤ cut ──▶ ChangeSet
//!                        └───────── at the cut ──────────┘
//! ```
//!
//! Memory is bounded: above `soft_bytes` a cut is asked for and each write is delayed a little
//! (never for long: a thread inside a FUSE request cannot be stopped); above `hard_bytes` content
//! goes to an unnamed file in the backing directory. If even that fails the log says so at the cut.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::mem;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hotspare_image::files::{CopyMark, FileChange, InodeNumber};

use crate::extents::{Content, Extents};

/// Memory an entry of the list takes besides content, bytes, roughly.
const ENTRY_BYTES: u64 = 160;

/// How long one write is delayed above the soft limit.
const DELAY: Duration = Duration::from_millis(10);

/// Limits of what is kept between two cuts.
#[derive(Clone, Copy, Debug)]
pub struct LogLimits {
    /// Above this many bytes of changes a cut is wanted and writers are slowed down.
    pub soft_bytes: u64,
    /// Above this many bytes written content goes to disk.
    pub hard_bytes: u64,
}

impl Default for LogLimits {
    fn default() -> Self {
        LogLimits { soft_bytes: 64 << 20, hard_bytes: 256 << 20 }
    }
}

/// An entry of the list: a change, or a write whose bytes are in the spill file.
#[derive(Clone, Debug)]
pub(crate) enum Recorded {
    Change(FileChange),
    Spilled { inode: InodeNumber, offset: u64, at: u64, length: u64 },
}

/// What a cut takes out of the log.
#[derive(Debug, Default)]
pub(crate) struct Cut {
    pub recorded: Vec<Recorded>,
    pub touched: BTreeSet<InodeNumber>,
    pub spill: Option<Arc<File>>,
}

#[derive(Debug, Default)]
struct State {
    ordered: Vec<Recorded>,
    pending: BTreeMap<InodeNumber, Extents>,
    touched: BTreeSet<InodeNumber>,
    memory_bytes: u64,
    spill: Option<(Arc<File>, u64)>,
    lost: Option<String>,
    cut_asked: bool,
    cuts: u64,
}

type CutWanted = Box<dyn Fn() + Send + Sync>;

/// The log of one replicated directory.
pub(crate) struct ChangeLog {
    state: Mutex<State>,
    cut_happened: Condvar,
    recording: AtomicBool,
    undelayed: AtomicBool,
    limits: LogLimits,
    spill_directory: PathBuf,
    cut_wanted: Mutex<Option<CutWanted>>,
}

impl ChangeLog {
    pub fn new(limits: LogLimits, spill_directory: PathBuf) -> ChangeLog {
        ChangeLog {
            state: Mutex::default(),
            cut_happened: Condvar::new(),
            recording: AtomicBool::new(false),
            undelayed: AtomicBool::new(false),
            limits,
            spill_directory,
            cut_wanted: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn on_cut_wanted(&self, wanted: CutWanted) {
        *self.cut_wanted.lock().unwrap_or_else(PoisonError::into_inner) = Some(wanted);
    }

    pub fn recording(&self) -> bool {
        self.recording.load(Ordering::Acquire)
    }

    /// Forgets everything and keeps nothing until [`ChangeLog::mark`].
    pub fn stop(&self) {
        let mut state = self.state();
        self.recording.store(false, Ordering::Release);
        *state = State { cuts: state.cuts + 1, ..State::default() };
        self.cut_happened.notify_all();
    }

    /// Starts recording if it does not yet, and marks this point for an initial copy.
    pub fn mark(&self, mark: CopyMark) {
        let mut state = self.state();
        self.recording.store(true, Ordering::Release);
        state.settle_all();
        state.push(FileChange::Mark { mark });
    }

    /// Records a change of names; `touched` are the inodes whose attributes it changed.
    pub fn record(&self, change: FileChange, touched: &[InodeNumber]) {
        if self.recording() {
            let mut state = self.state();
            state.push(change);
            state.touched.extend(touched);
            self.check_entries(&mut state);
        }
    }

    /// Records a change whose order among the writes of `inode` matters.
    pub fn record_content(&self, inode: InodeNumber, change: FileChange) {
        if self.recording() {
            let mut state = self.state();
            state.settle(inode);
            state.push(change);
            state.touched.insert(inode);
            self.check_entries(&mut state);
        }
    }

    pub fn touch(&self, inode: InodeNumber) {
        if self.recording() {
            self.state().touched.insert(inode);
        }
    }

    /// Records that `inode` is gone: nothing else of it matters any more.
    pub fn forget(&self, inode: InodeNumber) {
        if self.recording() {
            let mut state = self.state();
            if let Some(extents) = state.pending.remove(&inode) {
                state.memory_bytes -= extents.memory_bytes();
            }
            state.touched.remove(&inode);
            state.push(FileChange::Forget { inode });
        }
    }

    /// Records written bytes.
    pub fn write(&self, inode: InodeNumber, offset: u64, bytes: &[u8]) {
        if !self.recording() || bytes.is_empty() {
            return;
        }
        let mut state = self.state();
        state.touched.insert(inode);
        if state.lost.is_some() {
            return;
        }
        if state.memory_bytes + bytes.len() as u64 > self.limits.hard_bytes {
            if let Err(error) = self.spill(&mut state, inode, offset, bytes) {
                let reason = format!("cannot keep them in a temporary file: {error}");
                *state = State { lost: Some(reason), cuts: state.cuts, ..State::default() };
            }
            return;
        }
        let extents = state.pending.entry(inode).or_default();
        let before = extents.memory_bytes();
        extents.write(offset, bytes);
        let after = extents.memory_bytes();
        state.memory_bytes = state.memory_bytes + after - before;
    }

    fn spill(
        &self,
        state: &mut State,
        inode: InodeNumber,
        offset: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        let (file, end) = match &mut state.spill {
            Some(spill) => spill,
            none => none.insert((Arc::new(tempfile::tempfile_in(&self.spill_directory)?), 0)),
        };
        let at = *end;
        file.write_all_at(bytes, at)?;
        *end += bytes.len() as u64;
        let extents = state.pending.entry(inode).or_default();
        let before = extents.memory_bytes();
        extents.write_spilled(offset, at, bytes.len() as u64);
        let after = extents.memory_bytes();
        state.memory_bytes = state.memory_bytes + after - before;
        Ok(())
    }

    /// Entries without content cannot be spilled; far too many of them lose the log.
    fn check_entries(&self, state: &mut State) {
        if state.ordered.len() as u64 * ENTRY_BYTES > 2 * self.limits.hard_bytes {
            let reason = format!("{} operations without a checkpoint", state.ordered.len());
            *state = State { lost: Some(reason), cuts: state.cuts, ..State::default() };
        }
    }

    /// Asks for a cut and delays the caller, a writer, when too much is waiting. Returns within
    /// 10 ms or so whatever happens.
    pub fn throttle(&self) {
        if !self.recording() || self.undelayed.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state();
        if state.memory_bytes <= self.limits.soft_bytes {
            return;
        }
        let cuts = state.cuts;
        if !mem::replace(&mut state.cut_asked, true) {
            drop(state);
            if let Some(wanted) = &*self.cut_wanted.lock().unwrap_or_else(PoisonError::into_inner) {
                wanted();
            }
            state = self.state();
        }
        let _ = self.cut_happened.wait_timeout_while(state, DELAY, |state| state.cuts == cuts);
    }

    /// While `undelayed`, writers are not slowed down: set it while the guest is stopped.
    pub fn set_undelayed(&self, undelayed: bool) {
        self.undelayed.store(undelayed, Ordering::Release);
    }

    /// Takes everything recorded so far, or says why it cannot be had.
    pub fn cut(&self) -> Result<Cut, String> {
        let mut state = self.state();
        state.settle_all();
        let cuts = state.cuts + 1;
        let taken = mem::replace(&mut *state, State { cuts, ..State::default() });
        self.cut_happened.notify_all();
        if let Some(reason) = taken.lost {
            self.recording.store(false, Ordering::Release);
            return Err(reason);
        }
        let spill = taken.spill.map(|(file, _)| file);
        Ok(Cut { recorded: taken.ordered, touched: taken.touched, spill })
    }
}

impl std::fmt::Debug for ChangeLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChangeLog").field("recording", &self.recording()).finish_non_exhaustive()
    }
}

impl State {
    fn push(&mut self, change: FileChange) {
        self.memory_bytes += ENTRY_BYTES;
        self.ordered.push(Recorded::Change(change));
    }

    /// Moves the written ranges of `inode` to the list.
    fn settle(&mut self, inode: InodeNumber) {
        let Some(extents) = self.pending.remove(&inode) else { return };
        for (offset, content) in extents.into_ordered() {
            self.memory_bytes += ENTRY_BYTES;
            self.ordered.push(match content {
                Content::Memory(bytes) => {
                    Recorded::Change(FileChange::Write { inode, offset, bytes })
                }
                Content::Spilled { at, length } => Recorded::Spilled { inode, offset, at, length },
            });
        }
    }

    fn settle_all(&mut self) {
        while let Some((inode, _)) = self.pending.first_key_value() {
            let inode = *inode;
            self.settle(inode);
        }
    }
}
