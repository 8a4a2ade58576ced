//! Where the pages of a checkpoint can be had, one by one: a store, a peer, a file.
//!
//! A restart that does not wait for everything asks for what the program touches first, and for
//! the rest behind it. It knows nothing of where pages come from; whoever has them knows nothing
//! of processes.

use minicbor::{Decode, Encode};

use crate::bytes::SharedBytes;
use crate::memory::{PAGE_BYTES, PageOwner};

/// Some pages of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(array)]
pub struct Span {
    /// Whose.
    #[n(0)]
    pub owner: PageOwner,
    /// Address (in an address space) or offset (in a shared object) of the first byte; a multiple
    /// of [`PAGE_BYTES`].
    #[n(1)]
    pub start: u64,
    /// How many pages.
    #[n(2)]
    pub pages: u64,
}

impl Span {
    /// One past the last byte.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.pages.saturating_mul(PAGE_BYTES))
    }
}

/// Pages that were asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Which.
    pub span: Span,
    /// What they hold.
    pub content: BlockContent,
}

/// What the pages of a block hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockContent {
    /// These bytes: [`PAGE_BYTES`] for each page.
    Bytes(SharedBytes),
    /// Zeros, written by the guest.
    Zero,
    /// Nothing of their own: zeros where memory is anonymous or shared, otherwise what the mapped
    /// file holds.
    Absent,
}

/// Why pages cannot be had.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum SourceError {
    /// they cannot be reached: {0}
    #[error("pages of the checkpoint cannot be reached: {0}")]
    Gone(String),
    /// they are damaged: {0}
    #[error("pages of the checkpoint are damaged: {0}")]
    Damaged(String),
}

/// Has the pages of one checkpoint.
pub trait PageSource: Send + Sync {
    /// The pages of `wanted`, all of them: in the order of `wanted`, and within a span by address;
    /// a span may come in several blocks, and no block has pages that nobody asked for. It is
    /// worth asking for much at once: a source makes few requests of many spans. What it gives
    /// was checked; after an error another source may be asked for the same.
    fn read(&self, wanted: &[Span]) -> Result<Vec<Block>, SourceError>;

    /// What comes along with `wanted` at no further cost, `wanted` included: a source that keeps
    /// pages in blocks reads no less than a block. In the order of `wanted`, each page once.
    fn whole(&self, wanted: &[Span]) -> Vec<Span> {
        wanted.to_vec()
    }

    /// Of `wanted`, what comes for about `room` bytes, and the others; both in the order of
    /// `wanted`. Cheap is what comes along with much else of it.
    fn cheapest(&self, wanted: &[Span], room: u64) -> (Vec<Span>, Vec<Span>) {
        let mut room = room / PAGE_BYTES;
        let (mut cheap, mut others) = (Vec::new(), Vec::new());
        for span in wanted {
            let pages = span.pages.min(room);
            room -= pages;
            let start = span.start + pages * PAGE_BYTES;
            cheap.extend((pages > 0).then_some(Span { pages, ..*span }));
            let pages = span.pages - pages;
            others.extend((pages > 0).then_some(Span { start, pages, ..*span }));
        }
        (cheap, others)
    }

    /// Of `wanted`, what is worth being fetched out of the order of [`PageSource::all`]: not what
    /// comes along with a lot that nobody wanted.
    fn dense(&self, wanted: &[Span]) -> Vec<Span> {
        wanted.to_vec()
    }

    /// Everything but the pages that are [`BlockContent::Absent`], in the order in which it is
    /// cheapest to ask for; what a restart brings in behind the program.
    fn all(&self) -> Vec<Span>;
}
