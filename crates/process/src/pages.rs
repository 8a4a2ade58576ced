//! Runs of pages on their way from the guest to the ghost.
//!
//! # Order is meaning
//!
//! An epoch's runs are a history, not a set: pages are copied while the guest runs, and what was
//! copied early may be written again, discarded or unmapped before the guest is stopped. The
//! ghost first takes on the layout of the checkpoint, then applies the runs in the order they were
//! made; a later run wins. Parts of a run that lie in no mapping any more are skipped. Where a
//! mapping was made anew, a `Discard` of its whole range stands before its first page, so bytes
//! copied from an older mapping at the same place never show through.

use hotspare_image::SharedBytes;
use hotspare_image::memory::{PAGE_BYTES, PageOwner};

/// Consecutive pages of one owner with the same fate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Whose pages.
    pub owner: PageOwner,
    /// Address, or offset in a shared object; a multiple of the page size if whole pages follow.
    pub start: u64,
    /// What happened to them.
    pub content: Content,
}

/// What the pages of a run hold now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// These bytes. The capture makes whole pages; to the ghost a part of one may come.
    Bytes(SharedBytes),
    /// Zeroes, this many pages.
    Zero(u64),
    /// Nothing of their own, this many pages: back to zero, or to the file's content in a private
    /// file mapping (`MADV_DONTNEED`, or mapped anew).
    Discard(u64),
}

impl PageRun {
    /// Number of whole pages.
    pub fn pages(&self) -> u64 {
        match &self.content {
            Content::Bytes(bytes) => bytes.len() as u64 / PAGE_BYTES,
            Content::Zero(pages) | Content::Discard(pages) => *pages,
        }
    }

    /// One past the last byte.
    pub fn end(&self) -> u64 {
        self.start
            + match &self.content {
                Content::Bytes(bytes) => bytes.len() as u64,
                Content::Zero(pages) | Content::Discard(pages) => pages * PAGE_BYTES,
            }
    }
}
