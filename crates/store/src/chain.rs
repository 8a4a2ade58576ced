//! The links of a checkpoint in the store, and the blocks in their packs.

use std::ops::Range;

use crate::bucket::GAP_BYTES_MAX;
use crate::error::{StoreError, StoreResult};
use crate::manifest::{Block, Manifest};
use crate::names::Name;
use crate::nearby::PackSource;
use crate::reader::Store;
use crate::seal;

/// Bytes that are asked for at once when everything is wanted.
pub(crate) const WINDOW_BYTES: u64 = 8 << 20;

/// One checkpoint of a chain.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) name: Name,
    pub(crate) manifest: Manifest,
}

/// Which block of pages: number of its link, and its number there.
pub(crate) type BlockId = (u32, usize);

/// All that a checkpoint stands on, from the whole one on, and itself.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) store: Store,
    pub(crate) folder: String,
    pub(crate) links: Vec<Link>,
}

impl Chain {
    pub(crate) fn end(&self) -> &Link {
        self.links.last().expect("a chain has an end")
    }

    pub(crate) fn pack_name(&self, link: u32, pack: u32) -> String {
        let Link { name, manifest } = &self.links[link as usize];
        format!("{}/packs/{}", self.folder, name.pack(manifest.attempt, pack as usize))
    }

    /// Blocks, unpacked, of whichever links and packs, all at a time.
    pub(crate) fn blocks(&self, wanted: &[(u32, &Block)]) -> StoreResult<Vec<Vec<u8>>> {
        let mut objects: Vec<(String, Vec<Range<u64>>)> = Vec::new();
        // What lies far apart is asked for beside each other.
        for some in wanted.chunk_by(|a, b| is_near(*a, *b)) {
            let range =
                |(_, block): &(u32, &Block)| block.offset..block.offset + u64::from(block.stored);
            let object = self.pack_name(some[0].0, some[0].1.pack);
            objects.push((object, some.iter().map(range).collect()));
        }
        for near in self.store.nearby.iter().filter(|near| near.is_good()) {
            match self.ask(&*near.source, wanted, &objects) {
                Ok(blocks) => return Ok(blocks),
                Err(error) => near.failed(&error),
            }
        }
        let error = match self.ask(&*self.store.bucket, wanted, &objects) {
            Ok(blocks) => return Ok(blocks),
            Err(error) => error,
        };
        // Whoever failed a moment ago may be the last who has them.
        let mut others = self.store.nearby.iter();
        others.find_map(|near| self.ask(&*near.source, wanted, &objects).ok()).ok_or(error)
    }

    fn ask(
        &self,
        source: &dyn PackSource,
        wanted: &[(u32, &Block)],
        objects: &[(String, Vec<Range<u64>>)],
    ) -> StoreResult<Vec<Vec<u8>>> {
        let read = source.parts(objects)?;
        let parts = objects
            .iter()
            .zip(read)
            .flat_map(|((object, _), parts)| parts.into_iter().map(move |stored| (object, stored)));
        let blocks = wanted.iter().zip(parts);
        let blocks: Vec<Vec<u8>> = blocks
            .map(|((_, block), (object, stored))| self.open(object, stored, block))
            .collect::<StoreResult<_>>()?;
        match blocks.len() == wanted.len() {
            true => Ok(blocks),
            false => {
                Err(StoreError::Unreachable(format!("{}: answers too little", source.place())))
            }
        }
    }

    fn open(&self, object: &str, stored: Vec<u8>, block: &Block) -> StoreResult<Vec<u8>> {
        if seal::hash(&stored) != block.hash {
            let why = format!("some of the {} bytes from there have changed", block.stored);
            return Err(StoreError::damaged(object, block.offset, why));
        }
        let key = self.store.key.as_ref();
        let (at, raw) = ((object, block.offset), block.raw as usize);
        seal::unpack(stored, key, key.is_some(), at, raw)
    }

    /// Reads blocks in order, several by one request.
    pub(crate) fn each_block(
        &self,
        link: u32,
        blocks: &[Block],
        mut each: impl FnMut(usize, Vec<u8>) -> StoreResult<()>,
    ) -> StoreResult<()> {
        for Range { start, end } in windows(blocks) {
            let some: Vec<_> = blocks[start..end].iter().map(|block| (link, block)).collect();
            for (at, raw) in (start..).zip(self.blocks(&some)?) {
                each(at, raw)?;
            }
        }
        Ok(())
    }

    /// The bytes of the last link's state.
    pub(crate) fn state(&self) -> StoreResult<Vec<u8>> {
        let mut state = Vec::new();
        let link = self.links.len() as u32 - 1;
        self.each_block(link, &self.end().manifest.state, |_, raw| {
            state.extend(raw);
            Ok(())
        })?;
        Ok(state)
    }

    /// A block of pages.
    pub(crate) fn block(&self, (link, at): BlockId) -> (u32, &Block) {
        (link, &self.links[link as usize].manifest.blocks[at])
    }
}

/// Whether one request for both is better than two.
fn is_near(before: (u32, &Block), next: (u32, &Block)) -> bool {
    let end = before.1.offset + u64::from(before.1.stored);
    let gap = next.1.offset.checked_sub(end);
    (before.0, before.1.pack) == (next.0, next.1.pack)
        && gap.is_some_and(|gap| gap <= GAP_BYTES_MAX)
}

/// Runs of blocks that are read by one request each.
pub(crate) fn windows(blocks: &[Block]) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for (at, block) in blocks.iter().enumerate() {
        let joins = found.last().is_some_and(|last| {
            let (first, before) = (&blocks[last.start], &blocks[at - 1]);
            let follows = before.offset + u64::from(before.stored) == block.offset;
            let end = block.offset + u64::from(block.stored);
            first.pack == block.pack && follows && end - first.offset <= WINDOW_BYTES
        });
        match found.last_mut().filter(|_| joins) {
            Some(last) => last.end = at + 1,
            None => found.push(at..at + 1),
        }
    }
    found
}
