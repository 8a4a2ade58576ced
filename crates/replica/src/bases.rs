//! What is remembered of the pages sent last.
//!
//! [`Bases`] are whole pages that both ends remember, so that one can be sent as its difference
//! from before. Sender and receiver hold equal caches without talking about it: both insert every
//! remembered page in the order of the stream and evict the page inserted longest ago. The spare
//! does not use the ghost's own memory for this, because pages of a checkpoint arrive (pre-copy)
//! before it is known which ranges the guest has discarded meanwhile.

use std::collections::HashMap;

use hotspare_image::memory::PageOwner;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages remembered: 16 MiB on each side of each stream.
pub const BASES_MAX: usize = 4096;

const NONE: u32 = u32::MAX;

/// A page by its owner and address (or offset).
pub type PageName = (PageOwner, u64);

/// Whole pages.
pub type Bases = Recent<[u8; PAGE]>;

impl Default for Bases {
    fn default() -> Self {
        Bases::with_limit(BASES_MAX, [0; PAGE])
    }
}

/// Something about each of the pages of which it was noted last; the one noted longest ago is
/// forgotten first. Memory grows with use up to the limit.
#[derive(Debug)]
pub struct Recent<T> {
    slots: HashMap<PageName, u32>,
    links: Vec<Link>,
    notes: Vec<T>,
    /// Slots of pages that were forgotten.
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    limit: usize,
    blank: T,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    name: PageName,
    newer: u32,
    older: u32,
}

impl<T: Copy> Recent<T> {
    /// Room for `limit` pages; a new note begins as `blank`.
    #[must_use]
    pub fn with_limit(limit: usize, blank: T) -> Self {
        assert!(limit > 0, "a cache of no pages");
        let (slots, links, notes, free) = (HashMap::new(), Vec::new(), Vec::new(), Vec::new());
        Recent { slots, links, notes, free, newest: NONE, oldest: NONE, limit, blank }
    }

    /// What was last noted of this page.
    #[must_use]
    pub fn get(&self, name: PageName) -> Option<&T> {
        Some(&self.notes[*self.slots.get(&name)? as usize])
    }

    /// The note of a page, which is the newest now, and whether there was one before.
    pub fn note(&mut self, name: PageName) -> (&mut T, bool) {
        let known = self.slots.get(&name).copied();
        let slot = match known {
            Some(slot) => {
                self.unlink(slot);
                slot
            }
            None => self.free_slot(name),
        };
        self.link_newest(slot);
        (&mut self.notes[slot as usize], known.is_some())
    }

    /// Forgets `pages` pages of `owner` from address `first` on.
    pub fn forget(&mut self, owner: PageOwner, first: u64, pages: u64) {
        if pages > self.slots.len() as u64 {
            let inside = |name: &PageName| {
                name.0 == owner && name.1 >= first && (name.1 - first) / (PAGE as u64) < pages
            };
            let names: Vec<PageName> = self.slots.keys().copied().filter(inside).collect();
            names.into_iter().for_each(|name| self.forget_one(name));
        } else {
            let address = |page| first.wrapping_add(page * PAGE as u64);
            (0..pages).for_each(|page| self.forget_one((owner, address(page))));
        }
    }

    /// Forgets all pages.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.links.clear();
        self.notes.clear();
        self.free.clear();
        (self.newest, self.oldest) = (NONE, NONE);
    }

    fn forget_one(&mut self, name: PageName) {
        if let Some(slot) = self.slots.remove(&name) {
            self.unlink(slot);
            self.free.push(slot);
        }
    }

    fn free_slot(&mut self, name: PageName) -> u32 {
        let slot = if let Some(slot) = self.free.pop() {
            slot
        } else if self.links.len() < self.limit {
            self.links.push(Link { name, newer: NONE, older: NONE });
            self.notes.push(self.blank);
            (self.links.len() - 1) as u32
        } else {
            let slot = self.oldest;
            self.unlink(slot);
            self.slots.remove(&self.links[slot as usize].name);
            slot
        };
        self.links[slot as usize].name = name;
        self.slots.insert(name, slot);
        slot
    }

    fn unlink(&mut self, slot: u32) {
        let Link { newer, older, .. } = self.links[slot as usize];
        match newer {
            NONE => self.newest = older,
            _ => self.links[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.links[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, slot: u32) {
        let older = self.newest;
        self.links[slot as usize].newer = NONE;
        self.links[slot as usize].older = older;
        match older {
            NONE => self.oldest = slot,
            _ => self.links[older as usize].newer = slot,
        }
        self.newest = slot;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotspare_image::memory::MmId;

    const OWNER: PageOwner = PageOwner::Mm(MmId(1));

    fn name(page: u64) -> PageName {
        (OWNER, page * PAGE as u64)
    }

    fn put(recent: &mut Recent<u64>, page: u64, note: u64) {
        *recent.note(name(page)).0 = note;
    }

    #[test]
    fn the_page_noted_longest_ago_is_forgotten_first() {
        let mut recent = Recent::with_limit(2, 0);
        for (page, note) in [(1, 1), (2, 2), (1, 3), (4, 4)] {
            put(&mut recent, page, note);
        }
        let notes = [1, 2, 4].map(|page| recent.get(name(page)).copied());
        assert_eq!(notes, [Some(3), None, Some(4)]);
    }

    #[test]
    fn memory_stays_within_the_limit() {
        let mut recent = Recent::with_limit(8, 0);
        for page in 0..100 {
            put(&mut recent, page % 23, page);
            recent.forget(OWNER, (page % 5) * PAGE as u64, 1);
        }
        assert!(recent.slots.len() <= 8 && recent.links.len() == 8 && recent.notes.len() == 8);
        assert_eq!(recent.slots.len() + recent.free.len(), 8);
    }

    #[test]
    fn what_is_forgotten_is_gone_and_nothing_else() {
        for pages in [3, 1000] {
            let mut recent = Recent::with_limit(16, 0);
            (0..10).for_each(|page| put(&mut recent, page, page));
            recent.forget(OWNER, 7 * PAGE as u64, pages);
            let known: Vec<u64> =
                (0..10).filter(|page| recent.get(name(*page)).is_some()).collect();
            assert_eq!(known, [0, 1, 2, 3, 4, 5, 6]);
            put(&mut recent, 8, 80);
            assert_eq!(recent.get(name(8)), Some(&80));
        }
        let mut recent = Recent::with_limit(16, 0);
        (0..10).for_each(|page| put(&mut recent, page, page));
        recent.clear();
        assert!((0..10).all(|page| recent.get(name(page)).is_none()));
    }
}
