//! What a ghost has in memory, read from outside while it goes on taking checkpoints: the ground
//! for a second ghost, which takes the checkpoints that follow as well.
//!
//! A page that a checkpoint changes while it is read may be torn. That does no harm as long as the
//! copy takes every checkpoint that the ghost has taken since the reading began, in order: where a
//! run wrote, the last one decides, and where none did, nothing was torn.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};

use hotspare_image::memory::{AddressSpace, Backing, MmId, PAGE_BYTES, PageOwner, SharedId};
use hotspare_kernel::memory::{self, ProcMem};
use hotspare_kernel::pagemap::{Pagemap, Query, Region, category};
use hotspare_kernel::sparse::{next_data, read_up_to};
use hotspare_kernel::{HostPid, KernelError};

use super::Ghost;
use super::error::{GhostError, GhostResult};
use crate::pages::{Content, PageRun};

/// Bytes read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What a ghost has in memory, for a reader on another thread.
#[derive(Debug)]
pub struct GhostMemory {
    /// Address spaces of the last checkpoint, and who has them.
    pub spaces: Vec<(HostPid, AddressSpace)>,
    /// Shared memory objects.
    pub shared: BTreeMap<SharedId, OwnedFd>,
}

impl Ghost {
    /// What it has in memory, which must take no checkpoint while that is read.
    pub fn memory(&self) -> GhostResult<GhostMemory> {
        let holders = self.holders();
        let spaces = self.image().into_iter().flat_map(|image| &image.spaces);
        let spaces = spaces.filter_map(|space| Some((*holders.get(&space.id)?, space.clone())));
        Ok(GhostMemory { spaces: spaces.collect(), shared: self.duplicate_shared()? })
    }

    /// The processes that have the address spaces of the last checkpoint.
    pub fn holders(&self) -> BTreeMap<MmId, HostPid> {
        let bodies = self.bodies.values().filter(|body| !body.zombie);
        bodies.filter_map(|body| Some((body.space?, body.host))).collect()
    }

    /// Descriptors of its own for each shared memory object.
    pub fn duplicate_shared(&self) -> GhostResult<BTreeMap<SharedId, OwnedFd>> {
        let duplicate = |(id, fd): (SharedId, BorrowedFd<'_>)| {
            let fd = fd.try_clone_to_owned();
            Ok((id, fd.map_err(GhostError::io("duplicate shared memory"))?))
        };
        self.sources.all_shared().map(duplicate).collect()
    }

    /// How its clocks go.
    pub fn clocks(&self) -> crate::init::ClockOffsets {
        self.clocks
    }
}

/// Hands on what `holder` has of its own in the mappings of `space`. What is not there any more,
/// or not readable, is left out. Stops where `take` fails.
pub fn read_space<E: From<GhostError>>(
    holder: HostPid,
    space: &AddressSpace,
    take: &mut dyn FnMut(PageRun) -> Result<(), E>,
) -> Result<(), E> {
    let kernel = |error: KernelError| E::from(GhostError::from(error));
    let mut pagemap = Pagemap::open(holder).map_err(kernel)?;
    let reader = ProcMem::open(holder).map_err(kernel)?;
    let there = category::PRESENT | category::SWAPPED;
    let query = Query {
        any_of: there,
        // What the kernel has only of the file is there for the copy as well.
        all_of: category::FILE,
        inverted: category::FILE,
        report: there,
        ..Query::default()
    };
    for mapping in space.mappings.iter().filter(|mapping| has_own_pages(&mapping.backing)) {
        let mut found = Vec::new();
        let (start, end) = (mapping.range.start.0, mapping.range.end.0);
        pagemap.scan(start, end, query, &mut found).map_err(kernel)?;
        for Region { start, end, .. } in found {
            for start in (start..end).step_by(PIECE_BYTES as usize) {
                let length = (end - start).min(PIECE_BYTES);
                for (start, bytes) in read_piece(holder, &reader, start, length) {
                    let (owner, content) = (PageOwner::Mm(space.id), Content::Bytes(bytes.into()));
                    take(PageRun { owner, start, content })?;
                }
            }
        }
    }
    Ok(())
}

fn has_own_pages(backing: &Backing) -> bool {
    match backing {
        Backing::Anonymous | Backing::PrivateFile { .. } => true,
        Backing::SharedMemory { private, .. } => *private,
        Backing::SharedFile { .. } | Backing::Special { .. } => false,
    }
}

/// A piece, or those pages of it that can be read.
fn read_piece(holder: HostPid, reader: &ProcMem, start: u64, length: u64) -> Vec<(u64, Vec<u8>)> {
    let mut bytes = vec![0u8; length as usize];
    if memory::read(holder, &[(start, bytes.len())], &mut bytes).is_ok_and(|got| got == bytes.len())
    {
        return vec![(start, bytes)];
    }
    // Memory that its owner may not read, either.
    if reader.read_exact(start, &mut bytes).is_ok() {
        return vec![(start, bytes)];
    }
    let pages = (start..start + length).step_by(PAGE_BYTES as usize);
    let page = |at| {
        let mut bytes = vec![0u8; PAGE_BYTES as usize];
        reader.read_exact(at, &mut bytes).ok().map(|()| (at, bytes))
    };
    pages.filter_map(page).collect()
}

/// Hands on what a shared memory object holds.
pub fn read_shared<E: From<GhostError>>(
    id: SharedId,
    object: &File,
    take: &mut dyn FnMut(PageRun) -> Result<(), E>,
) -> Result<(), E> {
    let failed = |error: std::io::Error| E::from(GhostError::io("read shared memory")(error));
    let mut at = 0;
    while let Some((start, end)) = next_data(object, at).map_err(|errno| failed(errno.into()))? {
        let length = (end - start).min(PIECE_BYTES);
        let mut bytes = vec![0u8; length as usize];
        let got = read_up_to(object, &mut bytes, start).map_err(failed)?;
        bytes.truncate(got);
        at = start + length;
        let (owner, content) = (PageOwner::Shared(id), Content::Bytes(bytes.into()));
        take(PageRun { owner, start, content })?;
    }
    Ok(())
}
