//! Which pages of anonymous memory have content, kept up to date by changes alone.
//!
//! Going over all of a large memory takes its time, and the guest stands still meanwhile. The
//! kernel is about six times as fast when it is only asked which entries of the page tables have no
//! mark (were not armed): pages that were written, and entries that are empty. An empty entry is
//! armed like a page, so it is told once. What was not told has not changed.

use hotspare_image::memory::PAGE_BYTES;

use super::ranges::{Ranges, merge_sorted};

/// Memory of one page table.
pub const TABLE_BYTES: u64 = 512 * PAGE_BYTES;

/// What a scan has told.
#[derive(Debug, Default)]
pub struct Changes {
    /// Written, with content.
    pub written: Ranges,
    /// Without content. Most never had any.
    pub gone: Ranges,
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
        self.lose(&changes.gone);
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

    /// Where page tables with content begin, and a page with content of each.
    pub fn one_page_of_each_table(&self) -> (Vec<u64>, Vec<u64>) {
        let (mut tables, mut pages) = (Vec::new(), Vec::new());
        for (start, end) in self.populated.iter() {
            let mut at = start;
            while at < end {
                let table = at & !(TABLE_BYTES - 1);
                if tables.last() != Some(&table) {
                    tables.push(table);
                    pages.push(at);
                }
                at = table + TABLE_BYTES;
            }
        }
        (tables, pages)
    }
}
