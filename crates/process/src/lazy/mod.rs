//! A restart that does not wait for its memory, after FREM (Li and Lan, "A Fast Restart Mechanism
//! for Checkpoint/Recovery Protocols in Networked Environments").
//!
//! ```text
//!  checkpoint ──▶ layout ──▶ what cannot come late ──▶ may start ──▶ finalise ──▶ runs
//!                    │                                    ▲
//!                  Loader: the touch set, in the order of first touch; the rest
//!                          what the guest waits for, ahead of it
//! ```
//!
//! Private anonymous memory comes late; everything else is there before the guest runs: shared
//! memory can be read by means that no page fault sees (read(2) of a memfd), and what a program
//! has written over its files is little.

use std::collections::BTreeMap;

use hotspare_image::memory::{PAGE_BYTES, PageOwner};
use hotspare_image::source::Span;

use crate::capture::ranges::{Ranges, merge_sorted};

mod head;
mod loader;
mod pending;
mod plan;
mod space;

pub use loader::{LoadFailure, Loaded, Loader, LoaderProgress};
pub(crate) use space::LazySpace;

pub use crate::ghost::needed_at_once;
pub use plan::{Due, Plan, Start, Window, steady};

/// The places of spans, by whose they are.
pub(crate) fn by_owner(all: &[Span]) -> BTreeMap<PageOwner, Ranges> {
    let mut owners: BTreeMap<PageOwner, Vec<(u64, u64)>> = BTreeMap::new();
    for span in all {
        owners.entry(span.owner).or_default().push((span.start, span.end()));
    }
    owners.into_iter().map(|(owner, spans)| (owner, merge_sorted(spans))).collect()
}

pub(crate) fn spans_of(owner: PageOwner, ranges: &Ranges) -> Vec<Span> {
    let span = |(start, end): (u64, u64)| Span { owner, start, pages: (end - start) / PAGE_BYTES };
    ranges.iter().map(span).collect()
}
