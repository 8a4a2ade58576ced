//! Which pages of anonymous memory have content, kept up to date by changes alone.
//!
//! Going over all of a large memory takes its time, and the guest stands still meanwhile. The
//! kernel is about six times as fast when it is only asked for entries of the page tables that are
//! not armed: pages that were written, and entries that are empty or missing. Every page that has
//! content and is not told has not changed.

use super::ranges::{Ranges, merge_sorted};

/// What a scan has told.
#[derive(Debug, Default)]
pub struct Changes {
    /// Not armed: written, or empty.
    pub changed: Ranges,
    /// Written, with content.
    pub written: Ranges,
}

/// The pages of one address space.
#[derive(Debug, Default)]
pub struct Anonymous {
    /// Pages with content.
    pub populated: Ranges,
    /// Pages that had content at the last checkpoint and have none now.
    pub gone: Ranges,
    mapped: Vec<(u64, u64)>,
}

impl Anonymous {
    /// Takes what a scan has told. Mappings that are `fresh` have been discarded as a whole.
    pub fn take(&mut self, changes: &Changes, fresh: &Ranges) {
        if !fresh.is_empty() {
            self.populated = self.populated.without(fresh);
            self.gone = self.gone.without(fresh);
        }
        let changed = self.populated.common(&changes.changed);
        self.lose(&changed.without(&changes.written));
        if !self.gone.is_empty() {
            // Written again as a whole page.
            self.gone = self.gone.without(&changes.written);
        }
        if !self.populated.holds(&changes.written) {
            self.populated = self.populated.with(&changes.written);
        }
    }

    /// These pages have no content any more.
    pub fn lose(&mut self, pages: &Ranges) {
        let lost = self.populated.common(pages);
        if !lost.is_empty() {
            self.populated = self.populated.without(&lost);
            self.gone = self.gone.with(&lost);
        }
    }

    /// Only these mappings exist.
    pub fn unmapped(&mut self, mapped: Vec<(u64, u64)>) {
        if mapped != self.mapped {
            let lost = self.populated.without(&merge_sorted(mapped.clone()));
            self.lose(&lost);
            self.mapped = mapped;
        }
    }
}
