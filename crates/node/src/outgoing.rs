//! What is on its way to the spares, in pieces that their queues have room for.
//!
//! A slow spare makes epochs longer and does nothing else: neither does the guest wait for it, nor
//! does memory grow. So nothing large is ever pushed at once. It waits here, and is handed out a
//! piece at a time, as long as there is room.

use std::collections::VecDeque;
use std::sync::Arc;

use hotspare_files::FilesError;
use hotspare_image::SharedBytes;
use hotspare_image::memory::{PAGE_BYTES, PageOwner};
use hotspare_process::pages::{Content, PageRun};
use hotspare_replica::{Broken, PageBatch, Sender};

/// About this much goes at once.
pub const PIECE_BYTES: u64 = 1 << 20;
/// Runs that travel together.
const RUNS_TOGETHER: usize = 4000;

/// Kind of a chunk among the file changes: a piece of a directory's first copy …
pub const CHUNK_COPY: u8 = 0;
/// … or of the changes of an epoch.
pub const CHUNK_CHANGES: u8 = 1;

type Chunks = Box<dyn Iterator<Item = Result<Vec<u8>, FilesError>>>;

enum Load {
    Runs(WaitingRuns),
    Files { head: [u8; 4], chunks: Chunks },
    State { bytes: Vec<u8>, sent: usize },
}

/// A piece that goes to each spare.
#[derive(Clone)]
pub enum Piece {
    Pages(Arc<PageBatch>),
    Zero(PageOwner, Arc<Vec<hotspare_replica::PageRun>>),
    Discard(PageOwner, Arc<Vec<hotspare_replica::PageRun>>),
    Files(Arc<Vec<u8>>),
    /// For spares that start from nothing.
    Copies(Arc<Vec<u8>>),
    State(Arc<Vec<u8>>),
}

impl Piece {
    /// Queues it for a spare.
    pub fn send(&self, spare: &Sender) -> Result<(), Broken> {
        match self {
            Self::Pages(batch) => spare.pages(batch.clone()),
            Self::Zero(owner, runs) => spare.zero_runs(*owner, runs.clone()),
            Self::Discard(owner, runs) => spare.discard_runs(*owner, runs.clone()),
            Self::Files(bytes) | Self::Copies(bytes) => spare.file_changes(bytes.clone()),
            Self::State(bytes) => spare.state(bytes.clone()),
        }
    }
}

/// Loads in the order in which they were added.
#[derive(Default)]
pub struct Outgoing(VecDeque<Load>);

impl Outgoing {
    /// Adds pages.
    pub fn add_runs(&mut self, runs: Vec<PageRun>) {
        self.0.push_back(Load::Runs(WaitingRuns { runs: runs.into(), gone: 0 }));
    }

    /// Adds what happened in replicated directory number `directory`.
    pub fn add_files(
        &mut self,
        directory: usize,
        kind: u8,
        chunks: impl Iterator<Item = Result<Vec<u8>, FilesError>> + 'static,
    ) {
        let head = [directory as u8, kind, 0, 0];
        self.0.push_back(Load::Files { head, chunks: Box::new(chunks) });
    }

    /// Adds the state of the guest.
    pub fn add_state(&mut self, bytes: Vec<u8>) {
        self.0.push_back(Load::State { bytes, sent: 0 });
    }

    /// Bytes of the pages that wait.
    pub fn page_bytes(&self) -> u64 {
        let bytes = |run: &PageRun| match &run.content {
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::Zero(_) | Content::Discard(_) => 0,
        };
        let each = self.0.iter().map(|load| match load {
            Load::Runs(waiting) => waiting.runs.iter().map(bytes).sum(),
            Load::Files { .. } | Load::State { .. } => 0,
        });
        each.sum()
    }

    /// The next piece; `None` if nothing waits.
    pub fn next(&mut self) -> Result<Option<Piece>, FilesError> {
        while let Some(load) = self.0.front_mut() {
            let piece = match load {
                Load::Runs(runs) => runs.next(),
                Load::Files { head, chunks } => {
                    let piece = match head[1] {
                        CHUNK_COPY => Piece::Copies,
                        _ => Piece::Files,
                    };
                    chunks.next().transpose()?.map(|chunk| piece(framed(*head, &chunk)))
                }
                Load::State { bytes, sent } => {
                    let end = bytes.len().min(*sent + PIECE_BYTES as usize);
                    let piece = bytes[*sent..end].to_vec();
                    *sent = end;
                    (!piece.is_empty()).then(|| Piece::State(Arc::new(piece)))
                }
            };
            if piece.is_some() {
                return Ok(piece);
            }
            self.0.pop_front();
        }
        Ok(None)
    }
}

fn framed(head: [u8; 4], chunk: &[u8]) -> Arc<Vec<u8>> {
    let mut bytes = Vec::with_capacity(chunk.len() + 8);
    bytes.extend_from_slice(&head);
    bytes.extend_from_slice(&(chunk.len() as u32).to_le_bytes());
    bytes.extend_from_slice(chunk);
    Arc::new(bytes)
}

/// Pages that wait, in order; of the first run, what is not gone yet.
#[derive(Default)]
struct WaitingRuns {
    runs: VecDeque<PageRun>,
    /// Pages of the first run that are gone.
    gone: u64,
}

impl WaitingRuns {
    /// Neighbours of one kind and owner travel together.
    fn next(&mut self) -> Option<Piece> {
        let first = self.runs.front()?;
        let owner = first.owner;
        match first.content {
            Content::Bytes(_) => {
                let batch = PageBatch::of(owner, self.take_bytes(owner));
                Some(Piece::Pages(Arc::new(batch.expect("whole pages at their addresses"))))
            }
            Content::Zero(_) => {
                let heads = self.take_heads(owner, |content| matches!(content, Content::Zero(_)));
                Some(Piece::Zero(owner, Arc::new(heads)))
            }
            Content::Discard(_) => {
                let discard = |content: &Content| matches!(content, Content::Discard(_));
                Some(Piece::Discard(owner, Arc::new(self.take_heads(owner, discard))))
            }
        }
    }

    fn take_bytes(&mut self, owner: PageOwner) -> Vec<(u64, SharedBytes)> {
        let mut pieces = Vec::new();
        let mut room = PIECE_BYTES / PAGE_BYTES;
        while room > 0
            && pieces.len() < RUNS_TOGETHER
            && let Some(run) = self.runs.front()
            && run.owner == owner
            && let Content::Bytes(content) = &run.content
        {
            let pages = (run.pages() - self.gone).min(room);
            let (from, to) = (self.gone * PAGE_BYTES, (self.gone + pages) * PAGE_BYTES);
            pieces.push((run.start + from, content.part(from as usize..to as usize)));
            room -= pages;
            self.gone += pages;
            if self.gone == run.pages() {
                self.runs.pop_front();
                self.gone = 0;
            }
        }
        pieces
    }

    fn take_heads(
        &mut self,
        owner: PageOwner,
        alike: impl Fn(&Content) -> bool,
    ) -> Vec<hotspare_replica::PageRun> {
        let mut heads = Vec::new();
        while heads.len() < RUNS_TOGETHER
            && let Some(run) = self.runs.front()
            && run.owner == owner
            && alike(&run.content)
        {
            heads.extend(heads_of(run));
            self.runs.pop_front();
        }
        heads
    }
}

/// The stream counts pages of a run in 32 bits.
fn heads_of(run: &PageRun) -> impl Iterator<Item = hotspare_replica::PageRun> + use<> {
    const MOST: u64 = u32::MAX as u64;
    let (start, pages) = (run.start, run.pages());
    (0..pages.div_ceil(MOST)).map(move |part| hotspare_replica::PageRun {
        first: start + part * MOST * PAGE_BYTES,
        pages: (pages - part * MOST).min(MOST) as u32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotspare_image::memory::MmId;

    const OWNER: PageOwner = PageOwner::Mm(MmId(1));

    fn bytes(start: u64, pages: u64) -> PageRun {
        let content: Vec<u8> =
            (0..pages * PAGE_BYTES).map(|at| (at / PAGE_BYTES + start) as u8).collect();
        PageRun { owner: OWNER, start: start * PAGE_BYTES, content: Content::Bytes(content.into()) }
    }

    #[test]
    fn a_long_run_goes_in_pieces_and_comes_whole() {
        let mut outgoing = Outgoing::default();
        let zero = PageRun { owner: OWNER, start: 0, content: Content::Zero(7) };
        let runs = vec![bytes(10, 3), bytes(100, 1000), zero, bytes(5000, 2)];
        outgoing.add_runs(runs.clone());
        outgoing.add_state(vec![9; 3 << 20]);
        let mut pages = Vec::new();
        let mut order = String::new();
        let mut state = 0;
        while let Some(piece) = outgoing.next().expect("reads no file") {
            match piece {
                Piece::Pages(batch) => {
                    assert!(batch.byte_count() as u64 <= PIECE_BYTES);
                    let mut bytes = batch.pages();
                    for run in batch.runs() {
                        for page in 0..u64::from(run.pages) {
                            let content = bytes.next().expect("a page of the run");
                            pages.push((run.first + page * PAGE_BYTES, content[0]));
                        }
                    }
                    order.push('p');
                }
                Piece::Zero(..) => order.push('z'),
                Piece::Discard(..) => order.push('d'),
                Piece::Files(_) | Piece::Copies(_) => order.push('f'),
                Piece::State(bytes) => {
                    assert!(bytes.len() as u64 <= PIECE_BYTES);
                    state += bytes.len();
                    order.push('s');
                }
            }
        }
        let expected: Vec<_> = [(10, 3), (100, 1000), (5000, 2)]
            .iter()
            .flat_map(|(start, pages)| *start..start + pages)
            .map(|page: u64| (page * PAGE_BYTES, page as u8))
            .collect();
        assert_eq!(pages, expected);
        assert_eq!((order.as_str(), state), ("ppppzpsss", 3 << 20));
    }
}
