//! Checkpoints come many times a second and are stored every few: here they become one.
//!
//! Of each page the newest content is kept, in an unnamed file, where a page that is written again
//! takes the room of the one before: so what waits is never more than the guest's memory, however
//! long the store is away. File changes are a history and kept as they come.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hotspare_image::memory::{PAGE_BYTES, PageOwner};
use hotspare_image::{Checkpoint, Position, Term};

use crate::error::{StoreError, StoreResult};
use crate::extents::Run;
use crate::pages::{Held, Layouts, Pages, Part, owners};

/// File changes that wait at most, besides a first copy.
const CHANGES_BYTES_MAX: u64 = 1 << 30;
/// Between the file changes of two epochs: a piece of no directory and no length.
pub(crate) const EPOCH_MARK: [u8; 8] = [0, 2, 0, 0, 0, 0, 0, 0];

/// A page's place in the unnamed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(u64);

impl Run for Slot {
    fn after(self, pages: u64) -> Self {
        Self(self.0 + pages)
    }
}

/// Pages in a file.
#[derive(Debug)]
struct Spool {
    file: File,
    used: u64,
    free: Vec<(u64, u64)>,
}

impl Spool {
    fn new(directory: &Path) -> io::Result<Self> {
        Ok(Self { file: tempfile::tempfile_in(directory)?, used: 0, free: Vec::new() })
    }

    /// Writes some of the pages; how many, and where.
    fn write(&mut self, bytes: &[u8]) -> io::Result<(u64, Slot)> {
        let wanted = bytes.len() as u64 / PAGE_BYTES;
        let (first, room) = match self.free.pop() {
            Some((first, room)) if room > wanted => {
                self.free.push((first + wanted, room - wanted));
                (first, wanted)
            }
            Some(found) => found,
            None => {
                let first = self.used;
                self.used += wanted;
                (first, wanted)
            }
        };
        let end = (room * PAGE_BYTES) as usize;
        self.file.write_all_at(&bytes[..end], first * PAGE_BYTES)?;
        Ok((room, Slot(first)))
    }
}

/// A file of bytes that come one after another.
#[derive(Debug)]
struct Log {
    file: File,
    length: u64,
}

impl Log {
    fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.length)?;
        self.length += bytes.len() as u64;
        Ok(())
    }
}

/// A checkpoint under way.
#[derive(Debug)]
struct Open {
    position: Position,
    term: Term,
    whole: bool,
    runs: Vec<(Part, Option<Held<Slot>>)>,
    state: Vec<u8>,
    changes_from: u64,
    /// Of `changes`: the first copies.
    copied: u64,
}

/// What goes into the store next.
#[derive(Debug)]
pub struct Batch {
    /// Nothing before it is needed.
    pub whole: bool,
    /// The checkpoint that it ends with.
    pub position: Position,
    /// Its reign.
    pub term: Term,
    /// When it was taken: milliseconds since 1970.
    pub time_ms: u64,
    /// Its state.
    pub state: Vec<u8>,
    /// Checkpoints that became this one.
    pub epochs: u64,
    pub(crate) pages: Pages<Slot>,
    spool: File,
    changes: File,
    pub(crate) changes_bytes: u64,
}

impl Batch {
    /// Bytes of the pages that are stored with it, before they are packed.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.pages.with_bytes() * PAGE_BYTES
    }

    pub(crate) fn read_pages(&self, slot: Slot, bytes: &mut [u8]) -> io::Result<()> {
        self.spool.read_exact_at(bytes, slot.0 * PAGE_BYTES)
    }

    pub(crate) fn read_changes(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.changes.read_exact_at(bytes, offset)
    }
}

/// Makes one of many.
#[derive(Debug)]
pub struct Gatherer {
    directory: PathBuf,
    spool: Spool,
    changes: Log,
    pages: Pages<Slot>,
    layouts: Layouts,
    open: Option<Open>,
    /// The last checkpoint that is whole.
    last: Option<(Position, Term, Checkpoint, Vec<u8>)>,
    whole: bool,
    epochs: u64,
    copied: u64,
}

impl Gatherer {
    /// Keeps what waits in `directory`. The first checkpoint must be full.
    pub fn new(directory: &Path) -> StoreResult<Self> {
        let (spool, changes) = Self::files(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
            spool,
            changes,
            pages: Pages::default(),
            layouts: Layouts::default(),
            open: None,
            last: None,
            whole: false,
            epochs: 0,
            copied: 0,
        })
    }

    fn files(directory: &Path) -> StoreResult<(Spool, Log)> {
        let made = || -> io::Result<_> {
            let file = tempfile::tempfile_in(directory)?;
            Ok((Spool::new(directory)?, Log { file, length: 0 }))
        };
        made().map_err(StoreError::local("make a file for what waits for the store in $TMPDIR"))
    }

    /// A checkpoint begins; a full one needs nothing before it.
    pub fn begin(&mut self, position: Position, term: Term, full: bool) {
        self.abort();
        if !full && self.last.is_none() {
            // It would stand on nothing.
            return;
        }
        self.open = Some(Open {
            position,
            term,
            whole: full,
            runs: Vec::new(),
            state: Vec::new(),
            changes_from: self.changes.length,
            copied: 0,
        });
    }

    /// Forgets everything: what comes is dropped until a full one begins.
    pub fn forget(&mut self) {
        match Self::new(&self.directory) {
            Ok(anew) => *self = anew,
            // What waits keeps its room.
            Err(_) => {
                self.abort();
                (self.last, self.epochs) = (None, 0);
            }
        }
    }

    /// The one under way is void.
    pub fn abort(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.changes.length = open.changes_from;
        for (part, held) in open.runs {
            if let Some(Held::At(slot)) = held {
                self.spool.free.push((slot.0, part.pages));
            }
        }
    }

    /// Whole pages of the checkpoint under way.
    pub fn pages(&mut self, owner: PageOwner, start: u64, bytes: &[u8]) -> StoreResult<()> {
        const ZERO: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];
        let Some(open) = &mut self.open else { return Ok(()) };
        let failed = StoreError::local("keep pages for the store in $TMPDIR");
        let pages: Vec<&[u8]> = bytes.chunks_exact(PAGE_BYTES as usize).collect();
        let mut first = start / PAGE_BYTES;
        let mut rest = bytes;
        for run in pages.chunk_by(|a, b| (*a == ZERO) == (*b == ZERO)) {
            let (mut run_bytes, after) = rest.split_at(run.len() * PAGE_BYTES as usize);
            rest = after;
            if run[0] == ZERO {
                let pages = run.len() as u64;
                open.runs.push((Part { owner, first, pages }, Some(Held::Zero)));
                first += pages;
                continue;
            }
            while !run_bytes.is_empty() {
                let (pages, slot) = self.spool.write(run_bytes).map_err(&failed)?;
                open.runs.push((Part { owner, first, pages }, Some(Held::At(slot))));
                first += pages;
                run_bytes = &run_bytes[(pages * PAGE_BYTES) as usize..];
            }
        }
        Ok(())
    }

    /// Pages that are zero.
    pub fn zero(&mut self, owner: PageOwner, start: u64, pages: u64) {
        let part = Part { owner, first: start / PAGE_BYTES, pages };
        self.open.iter_mut().for_each(|open| open.runs.push((part, Some(Held::Zero))));
    }

    /// Pages that have nothing of their own any more.
    pub fn discard(&mut self, owner: PageOwner, start: u64, pages: u64) {
        let part = Part { owner, first: start / PAGE_BYTES, pages };
        self.open.iter_mut().for_each(|open| open.runs.push((part, None)));
    }

    /// (A piece of) the state.
    pub fn state(&mut self, bytes: &[u8]) {
        self.open.iter_mut().for_each(|open| open.state.extend_from_slice(bytes));
    }

    /// (A piece of) the file changes; `copy` says that it is of a first copy.
    pub fn changes(&mut self, bytes: &[u8], copy: bool) -> StoreResult<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let copied = if copy { bytes.len() as u64 } else { 0 };
        open.copied += copied;
        if self.changes.length - self.copied - open.copied + copied > CHANGES_BYTES_MAX {
            return Err(StoreError::Local(format!(
                "more than {} MiB of file changes wait for the store",
                CHANGES_BYTES_MAX >> 20
            )));
        }
        self.changes.push(bytes).map_err(StoreError::local("keep file changes in $TMPDIR"))
    }

    /// The one under way is whole. False if it cannot stand on those before, and a full one is
    /// wanted. True if none is under way: it had nothing to stand on, and whoever knew that when
    /// it began has asked for a full one already, perhaps not at once.
    pub fn end(&mut self) -> StoreResult<bool> {
        let Some(open) = self.open.take() else { return Ok(true) };
        let checkpoint = Checkpoint::from_bytes(&open.state)
            .map_err(|error| StoreError::Local(format!("read what was captured: {error}")))?;
        let mut freed = Vec::new();
        let free = &mut |pages, slot: Slot| freed.push((slot.0, pages));
        if open.whole {
            self.pages.retain(&Default::default(), free);
            self.pages = Pages::default();
            self.layouts = Layouts::default();
            (self.whole, self.epochs) = (true, 0);
            self.drop_changes(open.changes_from)?;
            self.copied = open.copied;
        }
        let Some(lost) = self.layouts.step(&checkpoint) else { return Ok(false) };
        lost.into_iter().for_each(|part| self.pages.clear(part, free));
        for (part, held) in open.runs {
            match held {
                Some(held) => self.pages.put(part, held, free),
                None => self.pages.clear(part, free),
            }
        }
        self.pages.retain(&owners(&checkpoint), free);
        self.spool.free.append(&mut freed);
        if self.changes.length > 0 {
            let failed = StoreError::local("keep file changes in $TMPDIR");
            self.changes.push(&EPOCH_MARK).map_err(failed)?;
        }
        self.epochs += 1;
        self.last = Some((open.position, open.term, checkpoint, open.state));
        Ok(true)
    }

    /// Of file changes only those of the epoch that begins there count.
    fn drop_changes(&mut self, from: u64) -> StoreResult<()> {
        if from == 0 {
            return Ok(());
        }
        let failed = StoreError::local("keep file changes in $TMPDIR");
        let file = tempfile::tempfile_in(&self.directory).map_err(&failed)?;
        let mut kept = Log { file, length: 0 };
        let mut at = from;
        let mut bytes = vec![0; 1 << 20];
        while at < self.changes.length {
            let piece = (self.changes.length - at).min(bytes.len() as u64) as usize;
            self.changes.file.read_exact_at(&mut bytes[..piece], at).map_err(&failed)?;
            kept.push(&bytes[..piece]).map_err(&failed)?;
            at += piece as u64;
        }
        self.changes = kept;
        Ok(())
    }

    /// Bytes that wait.
    pub fn waiting_bytes(&self) -> u64 {
        self.pages.with_bytes() * PAGE_BYTES + self.changes.length
    }

    /// Whether a checkpoint has come since the last was taken, and none is under way.
    pub fn is_ready(&self) -> bool {
        self.epochs > 0 && self.open.is_none()
    }

    /// All that has come, to be stored; what comes next stands on it.
    pub fn take(&mut self) -> StoreResult<Option<Batch>> {
        let Some((position, term, checkpoint, state)) = self.last.as_ref() else { return Ok(None) };
        if !self.is_ready() {
            return Ok(None);
        }
        let (spool, changes) = Self::files(&self.directory)?;
        let batch = Batch {
            whole: std::mem::take(&mut self.whole),
            position: *position,
            term: *term,
            time_ms: checkpoint.clocks.realtime_ns / 1_000_000,
            state: state.clone(),
            epochs: std::mem::take(&mut self.epochs),
            pages: std::mem::take(&mut self.pages),
            spool: std::mem::replace(&mut self.spool, spool).file,
            changes_bytes: self.changes.length,
            changes: std::mem::replace(&mut self.changes, changes).file,
        };
        self.copied = 0;
        Ok(Some(batch))
    }
}
