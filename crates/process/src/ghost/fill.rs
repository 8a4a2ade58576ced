//! Page runs into the ghost, in their order.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use hotspare_image::SharedBytes;
use hotspare_image::memory::{Backing, GuestRange, PAGE_BYTES, mapping_flags};
use hotspare_kernel::memory;
use nix::fcntl::{FallocateFlags, fallocate};

use super::body::Body;
use super::error::{GhostError, GhostResult};
use crate::pages::{Content, PageRun};

/// Bytes collected before they are written.
const GATHER_BYTES: usize = 1 << 20;

/// Writes and discards on their way into one process. What is collected never overlaps, so the
/// two kinds can be carried out in any order.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    writes: Vec<(u64, SharedBytes)>,
    bytes: usize,
    written: BTreeMap<u64, u64>,
    discarded: BTreeMap<u64, u64>,
}

fn overlaps(set: &BTreeMap<u64, u64>, piece: GuestRange) -> bool {
    set.range(..piece.end.0).next_back().is_some_and(|(_, end)| *end > piece.start.0)
}

impl Gathered {
    /// Adds a run of `body`'s private pages; parts outside its mappings are skipped.
    pub(super) fn add(&mut self, body: &Body, run: &PageRun) -> GhostResult<()> {
        let whole = GuestRange::new(run.start, run.end());
        let mut at = run.start;
        while at < whole.end.0 {
            let after = body.layout.partition_point(|mapping| mapping.range.end.0 <= at);
            let Some(mapping) = body.layout.get(after) else { break };
            let start = at.max(mapping.range.start.0);
            let end = whole.end.0.min(mapping.range.end.0);
            if start >= end {
                break;
            }
            self.add_piece(body, run, GuestRange::new(start, end))?;
            at = end;
        }
        Ok(())
    }

    fn add_piece(&mut self, body: &Body, run: &PageRun, piece: GuestRange) -> GhostResult<()> {
        let Some(mapping) = body.mapping_at(piece.start.0) else { return Ok(()) };
        let own_zero = match &mapping.backing {
            Backing::Anonymous => true,
            Backing::PrivateFile { .. } | Backing::SharedMemory { private: true, .. } => false,
            Backing::SharedMemory { private: false, .. }
            | Backing::SharedFile { .. }
            | Backing::Special { .. } => return Ok(()),
        };
        match &run.content {
            Content::Bytes(bytes) => {
                let from = (piece.start.0 - run.start) as usize;
                let bytes = bytes.part(from..from + piece.bytes() as usize);
                let writable = i32::from(mapping.protection) & libc::PROT_WRITE != 0;
                self.write(body, piece, bytes, writable)
            }
            Content::Zero(_) if !own_zero => {
                let writable = i32::from(mapping.protection) & libc::PROT_WRITE != 0;
                let zeroes = SharedBytes::from(vec![0u8; GATHER_BYTES]);
                let mut at = piece.start.0;
                while at < piece.end.0 {
                    let end = piece.end.0.min(at + GATHER_BYTES as u64);
                    let bytes = zeroes.part(0..(end - at) as usize);
                    self.write(body, GuestRange::new(at, end), bytes, writable)?;
                    at = end;
                }
                Ok(())
            }
            Content::Zero(_) | Content::Discard(_) => self.discard(body, piece),
        }
    }

    fn write(
        &mut self,
        body: &Body,
        piece: GuestRange,
        bytes: SharedBytes,
        writable: bool,
    ) -> GhostResult<()> {
        if overlaps(&self.discarded, piece) || overlaps(&self.written, piece) {
            self.flush(body)?;
        }
        if !writable {
            return Ok(body.memory.write_all(piece.start.0, &bytes)?);
        }
        self.bytes += bytes.len();
        self.writes.push((piece.start.0, bytes));
        self.written.insert(piece.start.0, piece.end.0);
        if self.bytes >= GATHER_BYTES { self.flush_writes(body) } else { Ok(()) }
    }

    fn discard(&mut self, body: &Body, piece: GuestRange) -> GhostResult<()> {
        if overlaps(&self.written, piece) || overlaps(&self.discarded, piece) {
            self.flush(body)?;
        }
        self.discarded.insert(piece.start.0, piece.end.0);
        if self.discarded.len() >= 200 { self.flush(body) } else { Ok(()) }
    }

    fn flush_writes(&mut self, body: &Body) -> GhostResult<()> {
        let pieces: Vec<_> = self.writes.iter().map(|(start, bytes)| (*start, &**bytes)).collect();
        let done = memory::write_pieces(body.host, &pieces)?;
        if done < self.bytes {
            let mut at = 0;
            for (start, bytes) in pieces {
                at += bytes.len();
                if at > done {
                    body.memory.write_all(start, bytes)?;
                }
            }
        }
        self.writes.clear();
        self.bytes = 0;
        self.written.clear();
        Ok(())
    }

    /// Carries out everything collected.
    pub(super) fn flush(&mut self, body: &Body) -> GhostResult<()> {
        self.flush_writes(body)?;
        let mut batch = body.batch();
        for (start, end) in std::mem::take(&mut self.discarded) {
            let locked = body.mapping_at(start).is_some_and(|mapping| {
                mapping.flags & (mapping_flags::LOCKED | mapping_flags::LOCK_ON_FAULT) != 0
            });
            batch.room(0, 3)?;
            let (bytes, advice) = (end - start, libc::MADV_DONTNEED as u64);
            if locked {
                batch.must("unlock memory", libc::SYS_munlock, &[start, bytes]);
            }
            batch.must("discard memory", libc::SYS_madvise, &[start, bytes, advice]);
            if locked {
                let on_fault = u64::from(libc::MLOCK_ONFAULT);
                batch.must("lock memory", libc::SYS_mlock2, &[start, bytes, on_fault]);
            }
        }
        batch.run()?;
        Ok(())
    }
}

/// Checks what the stream promised: addresses that do not wrap, and what is zero or discarded is so
/// in whole pages.
pub(super) fn check(run: &PageRun) -> GhostResult<()> {
    let (aligned, bytes) = match &run.content {
        Content::Bytes(bytes) => (true, Some(bytes.len() as u64)),
        Content::Zero(pages) | Content::Discard(pages) => {
            (run.start.is_multiple_of(PAGE_BYTES), pages.checked_mul(PAGE_BYTES))
        }
    };
    if aligned && bytes.and_then(|bytes| run.start.checked_add(bytes)).is_some() {
        return Ok(());
    }
    Err(GhostError::Image(format!("pages at {:#x}", run.start)))
}

/// Applies a run to a shared memory object of `size` bytes; what lies beyond its end is skipped.
pub(super) fn fill_shared(file: &File, size: u64, run: &PageRun) -> GhostResult<()> {
    // Bytes behind the end would make the object longer; they are zero anyway.
    let size = match run.content {
        Content::Bytes(_) => size,
        Content::Zero(_) | Content::Discard(_) => size.next_multiple_of(PAGE_BYTES),
    };
    let end = run.end().min(size);
    if run.start >= end {
        return Ok(());
    }
    let bytes = end - run.start;
    match &run.content {
        Content::Bytes(content) => file
            .write_all_at(&content[..bytes as usize], run.start)
            .map_err(GhostError::io("write shared memory")),
        Content::Zero(_) | Content::Discard(_) => {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            fallocate(file.as_fd(), flags, run.start as i64, bytes as i64)
                .map_err(|errno| GhostError::io("discard shared memory")(errno.into()))
        }
    }
}
