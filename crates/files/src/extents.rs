//! Written ranges of one file, without overlap: what later writes replaced is dropped.

use std::collections::BTreeMap;

/// Extents grow by appended writes up to this size, bytes; beyond it a new one starts.
const EXTENT_BYTES_MAX: usize = 1 << 20;

/// Bytes of a range: in memory, or at a place in the spill file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Memory(Vec<u8>),
    Spilled { at: u64, length: u64 },
}

impl Content {
    pub fn len(&self) -> u64 {
        match self {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::Spilled { length, .. } => *length,
        }
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        match self {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::Spilled { .. } => 0,
        }
    }

    /// Cuts off and returns what lies from `at` on.
    fn split_off(&mut self, cut: u64) -> Content {
        match self {
            Content::Memory(bytes) => Content::Memory(bytes.split_off(cut as usize)),
            Content::Spilled { at, length } => {
                let rest = Content::Spilled { at: *at + cut, length: *length - cut };
                *length = cut;
                rest
            }
        }
    }
}

/// Extents of a file by offset.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    map: BTreeMap<u64, Content>,
    memory_bytes: u64,
}

impl Extents {
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// The extents in order of their offsets.
    pub fn into_ordered(self) -> impl Iterator<Item = (u64, Content)> {
        self.map.into_iter()
    }

    /// Records `bytes` at `offset`.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() || self.overwrite(offset, bytes) {
            return;
        }
        self.discard(offset, bytes.len() as u64);
        if !self.append(offset, bytes) {
            self.insert(offset, Content::Memory(bytes.to_vec()));
        }
    }

    /// Records that the bytes at `offset` are those at `at` of the spill file.
    pub fn write_spilled(&mut self, offset: u64, at: u64, length: u64) {
        if length > 0 {
            self.discard(offset, length);
            self.insert(offset, Content::Spilled { at, length });
        }
    }

    fn insert(&mut self, offset: u64, content: Content) {
        self.memory_bytes += content.memory_bytes();
        self.map.insert(offset, content);
    }

    /// Copies over an extent that covers the whole range (a page written again and again).
    fn overwrite(&mut self, offset: u64, bytes: &[u8]) -> bool {
        let Some((start, content)) = self.map.range_mut(..=offset).next_back() else {
            return false;
        };
        let Content::Memory(old) = content else { return false };
        let from = (offset - start) as usize;
        let Some(target) = old.get_mut(from..from.saturating_add(bytes.len())) else {
            return false;
        };
        target.copy_from_slice(bytes);
        true
    }

    /// Lengthens the extent that ends at `offset`. The range itself must be free.
    fn append(&mut self, offset: u64, bytes: &[u8]) -> bool {
        let Some((start, content)) = self.map.range_mut(..offset).next_back() else {
            return false;
        };
        let Content::Memory(old) = content else { return false };
        if start + old.len() as u64 != offset || old.len() + bytes.len() > EXTENT_BYTES_MAX {
            return false;
        }
        old.extend_from_slice(bytes);
        self.memory_bytes += bytes.len() as u64;
        true
    }

    /// Drops whatever is recorded for a range.
    pub fn discard(&mut self, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        self.split_at(offset);
        self.split_at(end);
        let inside: Vec<u64> = self.map.range(offset..end).map(|(start, _)| *start).collect();
        for start in inside {
            if let Some(content) = self.map.remove(&start) {
                self.memory_bytes -= content.memory_bytes();
            }
        }
    }

    /// Makes an extent boundary at `offset`.
    fn split_at(&mut self, offset: u64) {
        let Some((start, content)) = self.map.range_mut(..offset).next_back() else { return };
        let start = *start;
        if start + content.len() > offset {
            let rest = content.split_off(offset - start);
            self.map.insert(offset, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(extents: Extents) -> Vec<(u64, Vec<u8>)> {
        extents
            .into_ordered()
            .map(|(offset, content)| match content {
                Content::Memory(bytes) => (offset, bytes),
                Content::Spilled { at, length } => (offset, vec![at as u8; length as usize]),
            })
            .collect()
    }

    #[test]
    fn appended_writes_become_one_extent() {
        let mut extents = Extents::default();
        extents.write(10, b"abc");
        extents.write(13, b"def");
        assert_eq!(extents.memory_bytes(), 6);
        assert_eq!(contents(extents), [(10, b"abcdef".to_vec())]);
    }

    #[test]
    fn a_later_write_replaces_what_it_overlaps() {
        let mut extents = Extents::default();
        extents.write(0, b"aaaa");
        extents.write(8, b"bbbb");
        extents.write(2, b"cccccccc");
        assert_eq!(extents.memory_bytes(), 12);
        let mut file = [0u8; 12];
        for (offset, bytes) in contents(extents) {
            file[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
        }
        assert_eq!(&file, b"aaccccccccbb");
    }

    #[test]
    fn spilled_ranges_are_cut_like_those_in_memory() {
        let mut extents = Extents::default();
        extents.write_spilled(0, 100, 10);
        extents.write(4, b"xy");
        let parts: Vec<(u64, Content)> = extents.into_ordered().collect();
        assert_eq!(parts[0], (0, Content::Spilled { at: 100, length: 4 }));
        assert_eq!(parts[1], (4, Content::Memory(b"xy".to_vec())));
        assert_eq!(parts[2], (6, Content::Spilled { at: 106, length: 4 }));
    }

    #[test]
    fn random_writes_give_the_same_file_as_a_flat_buffer() {
        for seed in 0..200u64 {
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut next = |limit: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % limit
            };
            let (mut flat, mut extents) = (vec![0u8; 512], Extents::default());
            for _ in 0..60 {
                let offset = next(400);
                let bytes = vec![next(255) as u8 + 1; next(100) as usize];
                flat[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
                extents.write(offset, &bytes);
            }
            let (mut rebuilt, mut total) = (vec![0u8; 512], 0);
            let memory_bytes = extents.memory_bytes();
            for (offset, bytes) in contents(extents) {
                total += bytes.len() as u64;
                rebuilt[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
            }
            assert_eq!(rebuilt, flat, "seed {seed}");
            assert_eq!(memory_bytes, total, "seed {seed}");
        }
    }
}
