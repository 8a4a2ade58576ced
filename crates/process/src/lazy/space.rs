//! One address space whose pages are still coming.

use std::time::{Duration, Instant};

use hotspare_image::memory::{MmId, PAGE_BYTES, PageOwner};
use hotspare_image::source::Span;
use hotspare_kernel::missing::{Event, MissingPages, Put};

use super::pending::{Pending, Piece};
use crate::capture::ranges::{Ranges, merge_sorted};

/// An address space, and what it misses.
#[derive(Debug)]
pub(crate) struct LazySpace {
    /// Its name in the checkpoint; a child that was forked since has its parent's.
    pub(crate) id: MmId,
    pub(crate) missing: MissingPages,
    pub(crate) pending: Pending,
    /// Where missing pages are waited for, as far as events tell.
    registered: Ranges,
    /// Where something was moved to before we were told that what stood there is unmapped.
    owed: Ranges,
    /// Addresses that somebody waits for, one in a page, and that are on their way. Who is
    /// interrupted asks for the same again.
    waiting: Vec<(u64, Instant)>,
    /// How long pages were waited for, each by whoever came first.
    pub(crate) waited: Duration,
    pub(crate) ended: bool,
}

/// What events ask of the loader.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// Addresses somebody waits for.
    pub(crate) faults: Vec<u64>,
    /// Children.
    pub(crate) born: Vec<LazySpace>,
}

impl LazySpace {
    pub(crate) fn new(id: MmId, missing: MissingPages, registered: Ranges) -> Self {
        Self {
            id,
            missing,
            pending: Pending::default(),
            registered,
            owed: Ranges::default(),
            waiting: Vec::new(),
            waited: Duration::ZERO,
            ended: false,
        }
    }

    /// Reads what has happened, and keeps the books by it.
    pub(crate) fn read(&mut self, asked: &mut Asked) -> hotspare_kernel::Result<()> {
        let mut events = Vec::new();
        self.missing.read(&mut events)?;
        if events.iter().any(|event| !matches!(event, Event::Fault(_))) {
            // What they wait for may have moved, or come to nothing. They will ask again.
            for (at, since) in std::mem::take(&mut self.waiting) {
                self.waited += since.elapsed();
                self.missing.wake(page_of(at), PAGE_BYTES)?;
            }
        }
        for event in events {
            match event {
                Event::Fault(address) => asked.faults.push(address),
                Event::Fork(missing) => asked.born.push(Self {
                    id: self.id,
                    missing,
                    pending: self.pending.clone(),
                    registered: self.registered.clone(),
                    owed: self.owed.clone(),
                    // Only the thread that forked is in the child.
                    waiting: Vec::new(),
                    waited: Duration::ZERO,
                    ended: false,
                }),
                Event::Moved { from, to, bytes } => self.moved(from, to, bytes),
                Event::Removed(start, end) => drop(self.pending.remove(start, end)),
                Event::Unmapped(start, end) => self.unmapped(start, end),
            }
        }
        Ok(())
    }

    /// Both munmap(2) and mremap(2) tell of themselves after the fact. Of two threads, the one
    /// that unmapped may tell later than the one whose mapping the kernel put in the same place;
    /// what it says is not true any more then.
    fn moved(&mut self, from: u64, to: u64, bytes: u64) {
        let place = merge_sorted(vec![(to, to.saturating_add(bytes))]);
        self.owed = self.owed.with(&self.registered.common(&place));
        self.pending.shift(from, to, bytes);
        // What was moved away may stay registered (`MREMAP_DONTUNMAP`); if not, we hear of it.
        self.registered = self.registered.with(&place);
    }

    fn unmapped(&mut self, start: u64, end: u64) {
        let place = merge_sorted(vec![(start, end)]);
        let gone = place.without(&self.owed);
        self.owed = self.owed.without(&place);
        self.registered = self.registered.without(&gone);
        for (start, end) in gone.iter() {
            self.pending.remove(start, end);
        }
    }

    /// All that is still to come.
    pub(crate) fn left(&self) -> Vec<Span> {
        let owner = PageOwner::Mm(self.id);
        let pieces = self.pending.iter().filter(|_| !self.ended);
        let span =
            |piece: Piece| Span { owner, start: piece.source, pages: piece.bytes / PAGE_BYTES };
        pieces.map(span).collect()
    }

    /// Puts bytes in where they belong now. False if events have to be read first.
    pub(crate) fn put(&mut self, piece: Piece, bytes: &[u8]) -> hotspare_kernel::Result<bool> {
        let mut done = 0;
        let is_in = self.put_more(piece, bytes, &mut done)?;
        // Who waited for a part that is in runs on, whatever becomes of the rest.
        self.came(piece.at, piece.at + done);
        Ok(is_in)
    }

    /// Puts in what follows the `done` bytes that are in.
    fn put_more(
        &mut self,
        piece: Piece,
        bytes: &[u8],
        done: &mut u64,
    ) -> hotspare_kernel::Result<bool> {
        while *done < piece.bytes {
            let at = piece.at + *done;
            let rest = &bytes[*done as usize..];
            let put = self.missing.copy(at, rest)?;
            match put {
                Put::Done(bytes) => {
                    self.pending.remove(at, at + bytes);
                    *done += bytes;
                }
                Put::Changing => return Ok(false),
                Put::Ended => {
                    self.ended = true;
                    return Ok(true);
                }
                Put::There | Put::Elsewhere => {
                    // Of several mappings none has all; each page lies in one.
                    if put == Put::Elsewhere && rest.len() as u64 > PAGE_BYTES {
                        match self.missing.copy(at, &rest[..PAGE_BYTES as usize])? {
                            Put::Changing => return Ok(false),
                            Put::Ended => self.ended = true,
                            Put::Done(_) | Put::There | Put::Elsewhere => {}
                        }
                    }
                    self.missing.wake(at, PAGE_BYTES)?;
                    self.pending.remove(at, at + PAGE_BYTES);
                    *done += PAGE_BYTES;
                }
            }
        }
        Ok(true)
    }

    /// Somebody waits for an address whose page is to come. Whether nobody waited for that so far.
    pub(crate) fn awaits(&mut self, at: u64) -> bool {
        let is_new = self.waiting.iter().all(|(other, _)| page_of(*other) != page_of(at));
        if is_new {
            self.waiting.push((at, Instant::now()));
        }
        is_new
    }

    /// What pages that come point to from where somebody waits for them on: there it will probably
    /// go on. Of each, whether it is what is waited for itself.
    pub(crate) fn pointers(&self, piece: Piece, bytes: &[u8]) -> Vec<(u64, bool)> {
        let mut found = Vec::new();
        let waiting = self.waiting.iter().filter_map(|(at, _)| at.checked_sub(piece.at));
        for offset in waiting.filter(|offset| *offset < piece.bytes) {
            let words = bytes[offset as usize & !(WORD_BYTES - 1)..].as_chunks::<WORD_BYTES>().0;
            let words = words.iter().take(POINTERS).enumerate();
            found.extend(words.map(|(nth, word)| (u64::from_ne_bytes(*word), nth == 0)));
        }
        found
    }

    fn came(&mut self, start: u64, end: u64) {
        for (_, since) in self.waiting.extract_if(.., |(at, _)| (start..end).contains(at)) {
            self.waited += since.elapsed();
        }
    }

    /// The checkpoint has only zeroes there.
    pub(crate) fn put_zeroes(&mut self, piece: Piece) -> hotspare_kernel::Result<()> {
        let end = piece.at + piece.bytes;
        self.pending.remove(piece.at, end);
        // Who waits asks again, and gets them.
        for (at, _) in self.waiting.iter().filter(|(at, _)| (piece.at..end).contains(at)) {
            self.missing.wake(page_of(*at), PAGE_BYTES)?;
        }
        self.came(piece.at, end);
        Ok(())
    }

    /// Somebody waits for a page of which the checkpoint has nothing: zeroes, and some more behind
    /// it. False if events have to be read first.
    pub(crate) fn put_nothing(&mut self, at: u64) -> hotspare_kernel::Result<bool> {
        let mut bytes = PAGE_BYTES;
        let next = self.pending.within(at, at + ZEROES).first().map_or(at + ZEROES, |p| p.at);
        if next - at >= ZEROES {
            bytes = ZEROES;
        }
        loop {
            match self.missing.zero(at, bytes)? {
                Put::Changing => return Ok(false),
                Put::Elsewhere if bytes > PAGE_BYTES => bytes = PAGE_BYTES,
                Put::Done(_) => return Ok(true),
                Put::There | Put::Elsewhere => {
                    self.missing.wake(at, PAGE_BYTES)?;
                    return Ok(true);
                }
                Put::Ended => {
                    self.ended = true;
                    return Ok(true);
                }
            }
        }
    }
}

const WORD_BYTES: usize = size_of::<u64>();
/// Words that are looked at from where somebody waits on: an entry of a list or a hash table
/// begins with that many pointers at most.
const POINTERS: usize = 3;

/// The first byte of the page that has an address.
pub(crate) fn page_of(at: u64) -> u64 {
    at & !(PAGE_BYTES - 1)
}

/// Zeroes put in at once.
const ZEROES: u64 = 16 * PAGE_BYTES;
