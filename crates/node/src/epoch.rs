//! One epoch on the primary: pre-copy, stop, take the rest, send.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hotspare_image::memory::PageOwner;
use hotspare_image::tree::{GuestPid, ProcessState};
use hotspare_image::{Checkpoint, Epoch, NodeId, Position, Term};
use hotspare_kernel::pidfd;
use hotspare_process::capture::shared::SharedTable;
use hotspare_process::capture::{Captured, CheckpointRules};
use hotspare_process::guest::Guest;
use hotspare_process::init::ClockOffsets;
use hotspare_process::objects::capture::DescriptorCapture;
use hotspare_process::objects::error::{ObjectError, ObjectResult};
use hotspare_process::objects::ipc::IpcCapture;
use hotspare_process::objects::socket::SocketCapture;
use hotspare_process::objects::table::GuestProcess;
use hotspare_process::pages::{Content, PageRun};
use hotspare_replica::{PageBatch, Sender};

use crate::settings::Settings;
use hotspare_files::{InitialCopy, ReplicatedDir};

/// Pages that may be left for the pause.
const REST_PAGES: u64 = 512;
/// More than that and the guest is let go again to pre-copy.
const REST_PAGES_MAX: u64 = 8192;
const ROUNDS: u32 = 6;
const PIECE_BYTES: u64 = 1 << 20;
/// Room that a spare's queue must have before more is copied.
const ROOM_BYTES: usize = 4 << 20;

/// Takes checkpoints of a guest and hands them to the spares.
pub struct EpochMaker {
    pub guest: Guest,
    pub descriptors: DescriptorCapture,
    pub sockets: SocketCapture,
    pub ipc: IpcCapture,
    pub offsets: ClockOffsets,
    pub names: (String, String),
    pub directories: Vec<ReplicatedDir>,
    pub spares: BTreeMap<NodeId, Sender>,
    pub term: Term,
    /// The last epoch that was taken.
    pub epoch: Epoch,
    /// The next checkpoint must describe everything.
    pub full: bool,
    open: Option<Open>,
}

/// An epoch that has begun to travel.
struct Open {
    position: Position,
    copies: Vec<InitialCopy>,
    pages: u64,
}

/// What came of an attempt.
pub enum Attempt {
    /// Not now; try again in a moment.
    Later,
    /// A checkpoint is on its way.
    Taken(Box<Taken>),
}

/// A checkpoint on its way.
pub struct Taken {
    pub position: Position,
    pub captured: Captured,
    pub pages: u64,
}

impl EpochMaker {
    pub fn new(
        guest: Guest,
        settings: &Settings,
        outside: Vec<hotspare_process::objects::outside::OutsideDescriptor>,
        sockets: SocketCapture,
        ipc: IpcCapture,
    ) -> Self {
        Self {
            guest,
            descriptors: DescriptorCapture::new(settings.rules(), outside),
            sockets,
            ipc,
            offsets: ClockOffsets::default(),
            names: (String::new(), String::new()),
            directories: Vec::new(),
            spares: BTreeMap::new(),
            term: Term(0),
            epoch: Epoch(0),
            full: true,
            open: None,
        }
    }

    /// A spare must be told everything.
    pub fn begin_full(&mut self) -> anyhow::Result<()> {
        if let Some(open) = self.open.take() {
            self.each_spare(|spare| spare.abort(open.position));
        }
        self.full = true;
        Ok(())
    }

    /// Tries to take a checkpoint. Spares whose stream is broken drop out by themselves.
    pub fn attempt(&mut self) -> anyhow::Result<Attempt> {
        if self.lacks_room() {
            return Ok(Attempt::Later);
        }
        if self.open.is_none() {
            self.begin()?;
        }
        match self.try_attempt() {
            Ok(attempt) => Ok(attempt),
            Err(ObjectError::Transient { what, reason }) => {
                tracing::debug!(what, reason, "no checkpoint at this instant");
                Ok(Attempt::Later)
            }
            Err(ObjectError::Call(error)) if error.is_died() => Ok(Attempt::Later),
            Err(error) => Err(error).context("take a checkpoint"),
        }
    }

    fn begin(&mut self) -> anyhow::Result<()> {
        let position = Position::checkpoint(self.epoch.next());
        let mut copies = Vec::new();
        if self.full {
            self.guest.rewind();
            copies = self.directories.iter().map(ReplicatedDir::initial_copy).collect();
        }
        let (term, full) = (self.term, self.full);
        self.each_spare(|spare| spare.begin(position, term, full));
        self.open = Some(Open { position, copies, pages: 0 });
        Ok(())
    }

    fn lacks_room(&self) -> bool {
        self.spares
            .values()
            .any(|spare| spare.room_bytes() < ROOM_BYTES && spare.broken().is_none())
    }

    fn each_spare(&self, send: impl Fn(&Sender) -> Result<(), hotspare_replica::Broken>) {
        for spare in self.spares.values() {
            // A broken stream is reported by the reader of its answers.
            let _ = send(spare);
        }
    }

    fn try_attempt(&mut self) -> ObjectResult<Attempt> {
        if self.guest.needs_preparation() {
            self.guest.prepare()?;
        }
        if !self.copy_files()? || !self.precopy()? {
            return Ok(Attempt::Later);
        }
        for directory in &self.directories {
            directory.flush().map_err(files_failed)?;
        }
        let Some(captured) = self.stop_and_take()? else { return Ok(Attempt::Later) };
        let (mut captured, changes) = captured;
        let Some(open) = self.open.take() else { return Ok(Attempt::Later) };
        let runs = std::mem::take(&mut captured.runs);
        let pages = open.pages + self.send_runs(runs);
        captured.checkpoint.position = open.position;
        captured.checkpoint.term = self.term;
        captured.checkpoint.names.clone_from(&self.names);
        let clocks = &mut captured.checkpoint.clocks;
        clocks.monotonic_ns = clocks.monotonic_ns.wrapping_add_signed(self.offsets.monotonic_ns);
        clocks.boottime_ns = clocks.boottime_ns.wrapping_add_signed(self.offsets.boottime_ns);
        for (index, change) in changes.iter().enumerate() {
            for chunk in change.chunks(PIECE_BYTES as usize) {
                self.send_chunk(index, CHUNK_CHANGES, chunk.map_err(files_failed)?);
            }
        }
        let state = Arc::new(captured.checkpoint.to_bytes());
        self.each_spare(|spare| spare.state(state.clone()));
        self.each_spare(|spare| spare.end(open.position));
        self.epoch = open.position.epoch;
        self.full = false;
        self.guest.refresh_flags()?;
        Ok(Attempt::Taken(Box::new(Taken { position: open.position, captured, pages })))
    }

    /// Sends a piece of the directories' first copy; true when all of it is sent.
    fn copy_files(&mut self) -> ObjectResult<bool> {
        let Some(open) = &mut self.open else { return Ok(true) };
        if open.copies.is_empty() {
            return Ok(true);
        }
        let copies = std::mem::take(&mut open.copies);
        for (index, copy) in copies.into_iter().enumerate() {
            for chunk in copy.chunks(PIECE_BYTES as usize) {
                self.send_chunk(index, CHUNK_COPY, chunk.map_err(files_failed)?);
                self.guest.pump(&[], Duration::ZERO)?;
            }
        }
        Ok(true)
    }

    fn send_chunk(&self, directory: usize, kind: u8, chunk: Vec<u8>) {
        let mut bytes = Vec::with_capacity(chunk.len() + 8);
        bytes.extend_from_slice(&[directory as u8, kind, 0, 0]);
        bytes.extend_from_slice(&(chunk.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&chunk);
        let bytes = Arc::new(bytes);
        self.each_spare(|spare| spare.file_changes(bytes.clone()));
    }

    /// Copies while the guest runs, until little is left; false if a spare has no room.
    fn precopy(&mut self) -> ObjectResult<bool> {
        for _ in 0..ROUNDS {
            let before = self.guest.backlog_pages();
            self.guest.scan()?;
            let found = self.guest.backlog_pages();
            if found <= REST_PAGES {
                break;
            }
            while self.guest.backlog_pages() > 0 {
                if self.lacks_room() {
                    return Ok(false);
                }
                let mut runs = Vec::new();
                self.guest.precopy(PIECE_BYTES, &mut runs)?;
                let pages = self.send_runs(runs);
                if let Some(open) = &mut self.open {
                    open.pages += pages;
                }
                self.guest.pump(&[], Duration::ZERO)?;
            }
            if before > 0 && found > before * 2 {
                break;
            }
        }
        Ok(true)
    }

    fn stop_and_take(
        &mut self,
    ) -> ObjectResult<Option<(Captured, Vec<hotspare_files::ChangeSet>)>> {
        let Self { guest, descriptors, sockets, ipc, directories, .. } = self;
        let mut changes = Vec::new();
        let mut cut = || {
            for directory in directories.iter() {
                directory.flush().map_err(files_failed)?;
                changes.push(directory.cut().map_err(files_failed)?);
            }
            Ok(())
        };
        let mut objects = |guest: &Guest, shared: &mut SharedTable, checkpoint: &mut Checkpoint| {
            ipc.capture_into(shared, checkpoint)?;
            take_descriptors(guest, shared, checkpoint, descriptors, sockets)
        };
        let mut rules = CheckpointRules { objects: &mut objects };
        let captured = guest.checkpoint(REST_PAGES_MAX, &mut rules, &mut cut)?;
        Ok(captured.map(|captured| (captured, changes)))
    }

    /// Sends runs in order; neighbours of one kind and owner travel together.
    fn send_runs(&self, runs: Vec<PageRun>) -> u64 {
        let pages = runs.iter().map(PageRun::pages).sum();
        let mut pending: Vec<PageRun> = Vec::new();
        let mut bytes = 0;
        for run in runs {
            let fits = pending.first().is_none_or(|first| same_kind(first, &run));
            if !fits || bytes > PIECE_BYTES || pending.len() >= 4000 {
                self.send_alike(std::mem::take(&mut pending));
                bytes = 0;
            }
            bytes += run.pages() * 4096;
            pending.push(run);
        }
        self.send_alike(pending);
        pages
    }

    fn send_alike(&self, runs: Vec<PageRun>) {
        let Some(first) = runs.first() else { return };
        let owner = first.owner;
        let kind = std::mem::discriminant(&first.content);
        let heads = runs.iter().flat_map(heads).collect::<Vec<_>>();
        if kind == std::mem::discriminant(&Content::Bytes(Vec::new())) {
            let mut bytes = Vec::new();
            for run in &runs {
                if let Content::Bytes(content) = &run.content {
                    bytes.extend_from_slice(content);
                }
            }
            self.send_bytes(owner, heads, bytes);
        } else if kind == std::mem::discriminant(&Content::Zero(0)) {
            let heads = Arc::new(heads);
            self.each_spare(|spare| spare.zero_runs(owner, heads.clone()));
        } else {
            let heads = Arc::new(heads);
            self.each_spare(|spare| spare.discard_runs(owner, heads.clone()));
        }
    }

    fn send_bytes(&self, owner: PageOwner, heads: Vec<hotspare_replica::PageRun>, bytes: Vec<u8>) {
        if let Some(batch) = PageBatch::new(owner, heads, bytes) {
            let batch = Arc::new(batch);
            self.each_spare(|spare| spare.pages(batch.clone()));
        }
    }
}

/// Kind of a chunk among the file changes: a piece of a directory's first copy …
pub const CHUNK_COPY: u8 = 0;
/// … or of the changes of an epoch.
pub const CHUNK_CHANGES: u8 = 1;

fn same_kind(one: &PageRun, other: &PageRun) -> bool {
    one.owner == other.owner
        && std::mem::discriminant(&one.content) == std::mem::discriminant(&other.content)
}

/// The stream counts pages of a run in 32 bits.
fn heads(run: &PageRun) -> impl Iterator<Item = hotspare_replica::PageRun> + use<> {
    const MOST: u64 = u32::MAX as u64;
    let (start, pages) = (run.start, run.pages());
    (0..pages.div_ceil(MOST)).map(move |part| hotspare_replica::PageRun {
        first: start + part * MOST * 4096,
        pages: (pages - part * MOST).min(MOST) as u32,
    })
}

fn files_failed(error: hotspare_files::FilesError) -> ObjectError {
    ObjectError::refused("a replicated directory", error.to_string())
}

/// Fills the descriptors of the stopped guest in.
fn take_descriptors(
    guest: &Guest,
    shared: &mut SharedTable,
    checkpoint: &mut Checkpoint,
    descriptors: &mut DescriptorCapture,
    sockets: &mut SocketCapture,
) -> ObjectResult<()> {
    let mut alive = Vec::new();
    for process in &checkpoint.processes {
        if let ProcessState::Alive(_) = process.state
            && let Some(host) = guest.host_pid(process.pid)
        {
            alive.push((host, process.pid, pidfd::open(host)?));
        }
    }
    let processes: Vec<_> = alive
        .iter()
        .map(|(host, pid, pidfd)| GuestProcess { host: *host, pid: *pid, pidfd: pidfd.as_fd() })
        .collect();
    let mut name = |_: (u32, u32), inode: u64| SharedTable::name_of(inode);
    let captured = descriptors.capture(&processes, sockets, &mut name)?;
    for memfd in &captured.memfds {
        let (host, fd) = memfd.place;
        shared.note_descriptor(host, fd, memfd.object, memfd.kind.clone())?;
    }
    checkpoint.files = captured.files;
    let mut tables: BTreeMap<GuestPid, _> =
        processes.iter().map(|process| process.pid).zip(captured.tables).collect();
    for process in &mut checkpoint.processes {
        if let ProcessState::Alive(live) = &mut process.state {
            live.descriptors = tables.remove(&process.pid).unwrap_or_default();
        }
    }
    Ok(())
}
