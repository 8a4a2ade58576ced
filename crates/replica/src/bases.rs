//! Pages both ends remember, so that one can be sent as its difference from before.
//!
//! Sender and receiver hold equal caches without talking about it: both insert every remembered
//! page in the order of the stream and evict the page inserted longest ago. The spare does
//! not use the ghost's own memory for this, because pages of a checkpoint arrive (pre-copy)
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

/// The pages sent last, oldest forgotten first. Memory grows with use up to [`BASES_MAX`] pages.
#[derive(Debug)]
pub struct Bases {
    slots: HashMap<PageName, u32>,
    links: Vec<Link>,
    bytes: Vec<u8>,
    newest: u32,
    oldest: u32,
    limit: usize,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    name: PageName,
    newer: u32,
    older: u32,
}

impl Default for Bases {
    fn default() -> Self {
        Bases::with_limit(BASES_MAX)
    }
}

impl Bases {
    /// A cache of `limit` pages; both ends must agree on it.
    #[must_use]
    pub fn with_limit(limit: usize) -> Bases {
        assert!(limit > 0, "a cache of no pages");
        let (slots, links, bytes) = (HashMap::new(), Vec::new(), Vec::new());
        Bases { slots, links, bytes, newest: NONE, oldest: NONE, limit }
    }

    /// What was last remembered of this page.
    #[must_use]
    pub fn get(&self, name: PageName) -> Option<&[u8]> {
        let at = *self.slots.get(&name)? as usize * PAGE;
        Some(&self.bytes[at..at + PAGE])
    }

    /// Remembers a page as the newest.
    pub fn insert(&mut self, name: PageName, page: &[u8]) {
        let slot = match self.slots.get(&name) {
            Some(slot) => {
                let slot = *slot;
                self.unlink(slot);
                slot
            }
            None => self.free_slot(name),
        };
        let at = slot as usize * PAGE;
        self.bytes[at..at + PAGE].copy_from_slice(page);
        self.link_newest(slot);
    }

    fn free_slot(&mut self, name: PageName) -> u32 {
        let slot = if self.links.len() < self.limit {
            self.links.push(Link { name, newer: NONE, older: NONE });
            self.bytes.resize(self.bytes.len() + PAGE, 0);
            (self.links.len() - 1) as u32
        } else {
            let slot = self.oldest;
            self.unlink(slot);
            self.slots.remove(&self.links[slot as usize].name);
            self.links[slot as usize].name = name;
            slot
        };
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

    fn name(page: u64) -> PageName {
        (PageOwner::Mm(MmId(1)), page * PAGE as u64)
    }

    #[test]
    fn the_page_inserted_longest_ago_is_forgotten_first() {
        let mut bases = Bases::with_limit(2);
        bases.insert(name(1), &[1; PAGE]);
        bases.insert(name(2), &[2; PAGE]);
        bases.insert(name(1), &[3; PAGE]);
        bases.insert(name(4), &[4; PAGE]);
        assert_eq!(bases.get(name(1)), Some(&[3; PAGE][..]));
        assert_eq!(bases.get(name(2)), None);
        assert_eq!(bases.get(name(4)), Some(&[4; PAGE][..]));
    }

    #[test]
    fn memory_stays_within_the_limit() {
        let mut bases = Bases::with_limit(8);
        for page in 0..100 {
            bases.insert(name(page % 23), &[page as u8; PAGE]);
        }
        assert_eq!((bases.slots.len(), bases.links.len(), bases.bytes.len()), (8, 8, 8 * PAGE));
    }
}
