//! Checkpoints under way: staged whole and checked before anybody acts on them.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::Arc;

use hotspare_image::memory::{MmId, PageOwner, SharedId};
use hotspare_image::{Position, SharedBytes, Term};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::bases::PAGE;
use crate::frame::{Frame, FrameError, Kind};
use crate::message::{CheckpointBegin, CheckpointEnd};
use crate::pages::{Content, PageDecoder, RunKind};
use crate::sender::Committed;

/// Most bytes of a checkpoint's state; page bytes and file changes are apart from it.
pub const STATE_BYTES_MAX: usize = 256 << 20;

/// How much of a checkpoint stays in memory, and where the rest goes.
#[derive(Clone, Debug)]
pub struct StagingLimits {
    /// Bytes of pages, and again of file changes, kept in memory; beyond it they go to a file. An
    /// eighth of that more says where the pages belong.
    pub memory_bytes: usize,
    /// Directory of that file, which has no name and is gone when the process is.
    pub directory: PathBuf,
}

impl Default for StagingLimits {
    fn default() -> Self {
        StagingLimits { memory_bytes: 32 << 20, directory: std::env::temp_dir() }
    }
}

/// Next link of the chain that stands for a whole checkpoint: covers the checksums of its frames
/// and their order.
#[must_use]
pub fn chain(link: u64, frame_checksum: u64) -> u64 {
    xxh3_64_with_seed(&frame_checksum.to_le_bytes(), link)
}

/// Bytes that are written once and read once, in memory up to a limit.
#[derive(Debug)]
struct Pile {
    memory: Vec<u8>,
    spilled: Option<File>,
    limits: StagingLimits,
    length: u64,
}

impl Pile {
    fn new(limits: &StagingLimits) -> Pile {
        Pile { memory: Vec::new(), spilled: None, limits: limits.clone(), length: 0 }
    }

    fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.memory.len() + bytes.len() > self.limits.memory_bytes {
            self.spill()?;
        }
        if self.memory.capacity() == 0 {
            // All of it, of which only what is used takes memory: growing by copies would take
            // twice as much, and a block as large as this goes back to the kernel when it is freed.
            self.memory.reserve_exact(self.limits.memory_bytes.max(bytes.len()));
        }
        self.memory.extend_from_slice(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    fn spill(&mut self) -> io::Result<()> {
        let file = match &mut self.spilled {
            Some(file) => file,
            none => none.insert(tempfile::tempfile_in(&self.limits.directory)?),
        };
        file.write_all(&self.memory)?;
        self.memory.clear();
        Ok(())
    }

    fn into_reader(mut self) -> io::Result<PileReader> {
        match self.spilled.take() {
            None => Ok(PileReader::Memory(Arc::new(self.memory), 0)),
            Some(mut file) => {
                file.write_all(&self.memory)?;
                file.seek(SeekFrom::Start(0))?;
                self.memory = Vec::new();
                Ok(PileReader::File(BufReader::with_capacity(1 << 20, file)))
            }
        }
    }
}

/// Reads staged bytes back, in order.
#[derive(Debug)]
pub enum PileReader {
    /// They stayed in memory; how many have been read.
    Memory(Arc<Vec<u8>>, usize),
    /// They were too many.
    File(BufReader<File>),
}

impl Read for PileReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            PileReader::Memory(bytes, at) => {
                let read = bytes.get(*at..).unwrap_or_default().read(into)?;
                *at += read;
                Ok(read)
            }
            PileReader::File(file) => file.read(into),
        }
    }
}

/// What was sent of neighbouring pages.
#[derive(Clone, Copy, Debug)]
struct StagedRun {
    owner: PageOwner,
    first: u64,
    bytes: u64,
    kind: RunKind,
}

/// Bytes of a run in the index: owner, kind, identifier, first address, length.
const RUN_BYTES: usize = 26;

impl StagedRun {
    fn to_bytes(self) -> [u8; RUN_BYTES] {
        let (owner, id) = match self.owner {
            PageOwner::Mm(MmId(id)) => (0, u64::from(id)),
            PageOwner::Shared(SharedId(id)) => (1, id),
        };
        let mut bytes = [0; RUN_BYTES];
        (bytes[0], bytes[1]) = (owner, self.kind.number() as u8);
        for (place, word) in bytes[2..].chunks_exact_mut(8).zip([id, self.first, self.bytes]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: [u8; RUN_BYTES]) -> Option<StagedRun> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes[at..at + 8].try_into().ok()?));
        let owner = match bytes[0] {
            0 => PageOwner::Mm(MmId(word(2)? as u32)),
            _ => PageOwner::Shared(SharedId(word(2)?)),
        };
        let kind = RunKind::from_number(bytes[1].into())?;
        Some(StagedRun { owner, first: word(10)?, bytes: word(18)?, kind })
    }

    /// Takes `more` in if it follows as if it were one with this.
    fn joins(&mut self, more: StagedRun) -> bool {
        let follows = (self.owner, self.kind) == (more.owner, more.kind)
            && self.first + self.bytes == more.first
            && self.bytes + more.bytes <= u64::from(u32::MAX) * PAGE as u64;
        if follows {
            self.bytes += more.bytes;
        }
        follows
    }
}

/// Runs in their order. As many as a guest has dirty lines, so they do not stay in memory either.
#[derive(Debug)]
struct Index {
    pile: Pile,
    /// May still grow.
    last: Option<StagedRun>,
}

impl Index {
    fn new(limits: &StagingLimits) -> Index {
        let memory_bytes = limits.memory_bytes / 8;
        let limits = StagingLimits { memory_bytes, directory: limits.directory.clone() };
        Index { pile: Pile::new(&limits), last: None }
    }

    fn push(&mut self, run: StagedRun) -> io::Result<()> {
        if self.last.as_mut().is_some_and(|last| last.joins(run)) {
            return Ok(());
        }
        self.last.replace(run).map_or(Ok(()), |last| self.pile.push(&last.to_bytes()))
    }

    fn into_reader(mut self) -> io::Result<PileReader> {
        if let Some(last) = self.last.take() {
            self.pile.push(&last.to_bytes())?;
        }
        self.pile.into_reader()
    }
}

/// A checkpoint that has begun and not ended.
#[derive(Debug)]
pub(crate) struct Staging {
    begin: CheckpointBegin,
    frames: u64,
    hash: u64,
    runs: Index,
    pages: Pile,
    state: Vec<u8>,
    files: Pile,
}

impl Staging {
    pub(crate) fn new(begin: CheckpointBegin, checksum: u64, limits: &StagingLimits) -> Staging {
        Staging {
            begin,
            frames: 0,
            hash: chain(0, checksum),
            runs: Index::new(limits),
            pages: Pile::new(limits),
            state: Vec::new(),
            files: Pile::new(limits),
        }
    }

    pub(crate) fn position(&self) -> Position {
        self.begin.position
    }

    /// Takes one Pages, State or FileChanges frame.
    pub(crate) fn stage(
        &mut self,
        frame: &Frame<'_>,
        decoder: &mut PageDecoder,
    ) -> Result<(), FrameError> {
        self.frames += 1;
        self.hash = chain(self.hash, frame.checksum);
        match frame.kind {
            Kind::Pages => {
                let remember = frame.flags & crate::frame::FLAG_REMEMBER != 0;
                let (runs, pile) = (&mut self.runs, &mut self.pages);
                decoder.decode(frame.payload, remember, |owner, address, content| {
                    put_pages(runs, pile, owner, address, content)
                })
            }
            Kind::State if self.state.len() + frame.payload.len() > STATE_BYTES_MAX => {
                Err(FrameError::OutOfPlace { kind: Kind::State, why: "the state is too long" })
            }
            Kind::State => {
                self.state.extend_from_slice(frame.payload);
                Ok(())
            }
            Kind::FileChanges => self.files.push(frame.payload).map_err(FrameError::Staging),
            kind => Err(FrameError::OutOfPlace { kind, why: "within a checkpoint" }),
        }
    }

    /// Checks that nothing is missing.
    pub(crate) fn end(self, end: CheckpointEnd) -> Result<StagedCheckpoint, FrameError> {
        let malformed = |why: String| FrameError::Malformed { kind: Kind::CheckpointEnd, why };
        if end.position != self.begin.position {
            let (begun, ended) = (self.begin.position, end.position);
            return Err(malformed(format!("{begun} began and {ended} ended")));
        }
        if (end.frames, end.hash) != (self.frames, self.hash) {
            let (sent, seen) = (end.frames, self.frames);
            return Err(malformed(format!("{sent} frames were sent, {seen} or others arrived")));
        }
        Ok(StagedCheckpoint {
            begin: self.begin,
            inputs: end.inputs,
            runs: self.runs.into_reader().map_err(FrameError::Staging)?,
            run: None,
            given: 0,
            page_bytes: self.pages.length,
            pages: self.pages.into_reader().map_err(FrameError::Staging)?,
            state: self.state,
            file_bytes: self.files.length,
            files: self.files.into_reader().map_err(FrameError::Staging)?,
        })
    }
}

fn put_pages(
    runs: &mut Index,
    pile: &mut Pile,
    owner: PageOwner,
    address: u64,
    content: Content<'_>,
) -> Result<(), FrameError> {
    let whole = |pages: u32| u64::from(pages) * PAGE as u64;
    let (bytes, kind) = match content {
        Content::Zero(pages) => (whole(pages), RunKind::Zero),
        Content::Discard(pages) => (whole(pages), RunKind::Discard),
        Content::Bytes(bytes) => {
            pile.push(bytes).map_err(FrameError::Staging)?;
            (bytes.len() as u64, RunKind::Described)
        }
    };
    let run = StagedRun { owner, first: address, bytes, kind };
    runs.push(run).map_err(FrameError::Staging)
}

/// A complete, checked checkpoint. Its pages are decoded: applying it needs no more work than
/// writing them where they belong.
#[derive(Debug)]
pub struct StagedCheckpoint {
    begin: CheckpointBegin,
    inputs: Option<u64>,
    runs: PileReader,
    /// The run that is being handed out, and how many of its bytes have been.
    run: Option<StagedRun>,
    given: u64,
    page_bytes: u64,
    pages: PileReader,
    state: Vec<u8>,
    file_bytes: u64,
    files: PileReader,
}

impl StagedCheckpoint {
    /// What it is.
    #[must_use]
    pub fn position(&self) -> Position {
        self.begin.position
    }

    /// Reign of the primary that took it.
    #[must_use]
    pub fn term(&self) -> Term {
        self.begin.term
    }

    /// Says that this host has all of it.
    #[must_use]
    pub fn committed(&self) -> Committed {
        Committed(self.begin.position)
    }

    /// Of the packets that this spare has passed on: the last one that it covers.
    #[must_use]
    pub fn inputs(&self) -> Option<u64> {
        self.inputs
    }

    /// Whether it stands alone: the ghost is built anew from it.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.begin.full
    }

    /// The bytes of its `image::Checkpoint`.
    #[must_use]
    pub fn state(&self) -> &[u8] {
        &self.state
    }

    /// Bytes of pages that are neither zero nor discarded.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Bytes of file changes.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The file changes, as the primary sent them, to be read once.
    pub fn files(&mut self) -> &mut impl Read {
        &mut self.files
    }

    /// Hands out the pages in the order they were sent: where an address occurs twice, the later
    /// one counts. Can be done once; pieces are at most 1 MiB or, if zero or discarded, whole runs.
    ///
    /// `write` gets the owner, the address (offset) of the first page and the content.
    pub fn for_each_run<E: From<io::Error>>(
        &mut self,
        mut write: impl FnMut(PageOwner, u64, Content<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        while let Some((owner, first, content)) = self.next_run()? {
            match content {
                Staged::Zero(pages) => write(owner, first, Content::Zero(pages))?,
                Staged::Discard(pages) => write(owner, first, Content::Discard(pages))?,
                Staged::Bytes(bytes) => write(owner, first, Content::Bytes(&bytes))?,
            }
        }
        Ok(())
    }

    /// The next of what [`StagedCheckpoint::for_each_run`] hands out.
    pub fn next_run(&mut self) -> io::Result<Option<(PageOwner, u64, Staged)>> {
        const PIECE: u64 = 1 << 20;
        let Some(run) = self.run.map_or_else(|| read_run(&mut self.runs), |run| Ok(Some(run)))?
        else {
            return Ok(None);
        };
        let pages = (run.bytes / PAGE as u64) as u32;
        let whole = match run.kind {
            RunKind::Described => None,
            RunKind::Zero => Some(Staged::Zero(pages)),
            RunKind::Discard => Some(Staged::Discard(pages)),
        };
        if let Some(content) = whole {
            return Ok(Some((run.owner, run.first, content)));
        }
        let begin = self.given;
        let length = (run.bytes - begin).min(PIECE);
        let done = begin + length == run.bytes;
        (self.run, self.given) = if done { (None, 0) } else { (Some(run), begin + length) };
        let content = take(&mut self.pages, length as usize)?;
        Ok(Some((run.owner, run.first + begin, Staged::Bytes(content))))
    }
}

/// The next run of an index.
fn read_run(index: &mut PileReader) -> io::Result<Option<StagedRun>> {
    let mut bytes = [0; RUN_BYTES];
    if index.read(&mut bytes[..1])? == 0 {
        return Ok(None);
    }
    index.read_exact(&mut bytes[1..])?;
    let run = StagedRun::from_bytes(bytes);
    run.map(Some).ok_or_else(|| io::Error::other("the index of what was staged is damaged"))
}

/// What a staged run holds, without a copy where it is in memory. As [`Content`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Staged {
    /// This many zero pages.
    Zero(u32),
    /// This many pages that have nothing of their own any more.
    Discard(u32),
    /// These bytes; pages, or a part of a page.
    Bytes(SharedBytes),
}

/// The next bytes of a pile.
fn take(pile: &mut PileReader, length: usize) -> io::Result<SharedBytes> {
    match pile {
        PileReader::Memory(whole, at) => {
            let bytes = SharedBytes::of(whole, *at..*at + length);
            *at += length;
            bytes.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
        }
        PileReader::File(file) => {
            let mut bytes = vec![0; length];
            file.read_exact(&mut bytes)?;
            Ok(bytes.into())
        }
    }
}
