//! Pages read out of the guest, in pieces of memory that are used again and again: looking for
//! zeroes and cutting into runs can wait until the guest goes on. The runs share the piece, which
//! comes back when the last of them is sent.

use std::sync::Arc;

use hotspare_image::SharedBytes;
use hotspare_image::memory::{PAGE_BYTES, PageOwner};
use hotspare_kernel::HostPid;
use hotspare_kernel::memory::{self, ProcMem, Span};

use super::space::split_zeroes;
use crate::objects::error::ObjectResult;
use crate::pages::PageRun;

/// Kept for the next time, bytes.
const KEPT_BYTES: usize = 16 << 20;

/// Pages just read.
#[derive(Debug, Default)]
pub struct Rest {
    /// Discards; they come before the pages.
    pub discards: Vec<PageRun>,
    pieces: Vec<(PageOwner, u64, usize)>,
    bytes: Vec<u8>,
    used: usize,
    /// Pieces that runs may still share.
    lent: Vec<Arc<Vec<u8>>>,
}

impl Rest {
    /// Reads `spans` of a process. Pages that refuse to be read are left out.
    pub fn read(
        &mut self,
        owner: PageOwner,
        pid: HostPid,
        memory: &ProcMem,
        mut spans: Vec<Span>,
    ) -> ObjectResult<()> {
        const PAGE: usize = PAGE_BYTES as usize;
        while !spans.is_empty() {
            let wanted: usize = spans.iter().map(|span| span.1).sum();
            let end = self.used + wanted;
            if self.bytes.is_empty() {
                self.bytes = self.take_back();
            }
            if self.bytes.len() < end {
                self.bytes.resize(end, 0);
            }
            let got = memory::read(pid, &spans, &mut self.bytes[self.used..end])?;
            let mut whole = got & !(PAGE - 1);
            let mut left = Vec::new();
            for (start, length) in spans {
                let count = whole.min(length);
                whole -= count;
                if count > 0 {
                    self.pieces.push((owner, start, count));
                    self.used += count;
                }
                if count == length || !left.is_empty() {
                    left.extend((count < length).then_some((start, length)));
                    continue;
                }
                // `/proc/PID/mem` also reads what the program itself may not (`PROT_NONE`).
                let at = start + count as u64;
                match memory.read_exact(at, &mut self.bytes[self.used..self.used + PAGE]) {
                    Ok(()) => {
                        self.pieces.push((owner, at, PAGE));
                        self.used += PAGE;
                    }
                    Err(error) if error.errno() == Some(libc::EIO) => {}
                    Err(error) => return Err(error.into()),
                }
                left.push((at + PAGE_BYTES, length - count - PAGE));
            }
            left.retain(|span| span.1 > 0);
            spans = left;
        }
        Ok(())
    }

    /// Moves everything to the end of `runs`.
    pub fn drain_into(&mut self, runs: &mut Vec<PageRun>) {
        runs.append(&mut self.discards);
        if std::mem::take(&mut self.used) == 0 {
            return;
        }
        let whole = Arc::new(std::mem::take(&mut self.bytes));
        let mut at = 0;
        for (owner, start, length) in self.pieces.drain(..) {
            let piece = SharedBytes::of(&whole, at..at + length).expect("was read into it");
            split_zeroes(owner, start, &piece, runs);
            at += length;
        }
        let kept: usize = self.lent.iter().map(|piece| piece.len()).sum();
        if kept + whole.len() <= KEPT_BYTES {
            self.lent.push(whole);
        }
    }

    /// A piece that nobody shares any more, or an empty one.
    fn take_back(&mut self) -> Vec<u8> {
        let free = self.lent.iter().position(|piece| Arc::strong_count(piece) == 1);
        let piece = free.map(|at| self.lent.swap_remove(at));
        piece.and_then(|piece| Arc::try_unwrap(piece).ok()).unwrap_or_default()
    }
}
