//! Which pages of a checkpoint a program touched after it, and when.

use minicbor::{Decode, Encode};

use crate::checkpoint::ImageError;
use crate::memory::PAGE_BYTES;
use crate::source::Span;

/// The touch set of a checkpoint: in the order of first touch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct TouchSet {
    /// Each has what was touched first in its part of the tracking window. They do not overlap.
    #[n(0)]
    pub groups: Vec<TouchGroup>,
    /// Whether reads were seen as well; if not, pages that were only read are missing.
    #[n(1)]
    pub has_reads: bool,
    /// Pages that no restart can do without before the program runs, whatever it touches. Those
    /// that the checkpoint does not have are of no concern.
    #[n(2)]
    #[cbor(default)]
    pub needed: Vec<Span>,
    /// Of the pages that were touched in the first moments, those that were in the window before,
    /// too: what the program goes by, not what it just happens to work on.
    #[n(3)]
    #[cbor(default)]
    pub steady: Vec<Span>,
}

/// Pages that were touched for the first time in one part of the window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct TouchGroup {
    /// When that part ended, in milliseconds after the checkpoint.
    #[n(0)]
    pub until_ms: u32,
    /// The pages.
    #[n(1)]
    pub spans: Vec<Span>,
}

impl TouchGroup {
    /// How many pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.spans.iter().map(|span| span.pages).sum()
    }
}

impl TouchSet {
    /// How many pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.groups.iter().map(TouchGroup::pages).sum()
    }

    /// How many bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages() * PAGE_BYTES
    }

    /// A restart that used this set had to wait for other pages: next time they come first.
    pub fn learn(&mut self, missed: &[Span]) {
        if missed.is_empty() {
            return;
        }
        let until_ms = self.groups.first().map_or(0, |group| group.until_ms);
        self.groups.insert(0, TouchGroup { until_ms, spans: missed.to_vec() });
        if !self.steady.is_empty() {
            self.steady.splice(0..0, missed.iter().copied());
        }
    }

    /// Its CBOR bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        match minicbor::to_vec(self) {
            Ok(bytes) => bytes,
            Err(never) => unreachable!("writing to memory cannot fail: {never}"),
        }
    }

    /// Reads what [`TouchSet::to_bytes`] wrote. Never panics on foreign bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ImageError> {
        minicbor::decode(bytes).map_err(|error| ImageError::Malformed(error.to_string()))
    }
}
