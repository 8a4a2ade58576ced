//! Pages that a spare has kept of the ghost it had before, so that they need not travel again.
//!
//! A spare that joins a primary mostly has nearly all of the guest's memory: its primary was
//! replaced by another spare, or the link was cut for a moment. It tells the digests of what that
//! ghost holds, numbered as they come, and the primary names a page of its first, full checkpoint
//! by such a number. Where a page belongs is of no matter: no name of the older reign is used.
//!
//! A digest is 16 bytes of BLAKE3 under a key that the spare has drawn and no guest knows. The
//! spare compares the page that a number leads to with its digest before it takes it.

use std::collections::HashMap;
use std::io;

use crate::frame::{Frame, FrameError, Kind, PAYLOAD_BYTES_MAX};

/// Of a page.
pub type Digest = [u8; 16];
/// What digests are made with.
pub type DigestKey = [u8; 32];

/// Pages that are told at most: 16 GiB, for which a primary needs some 130 MB until its first
/// checkpoint is sent. The others travel.
pub const KEPT_MAX: usize = 1 << 22;
/// Digests that fit into a frame.
pub const DIGESTS_MAX: usize = (PAYLOAD_BYTES_MAX - size_of::<DigestKey>()) / size_of::<Digest>();

/// The digest of a page.
#[must_use]
pub fn digest(key: &DigestKey, page: &[u8]) -> Digest {
    let mut digest = Digest::default();
    digest.copy_from_slice(&blake3::keyed_hash(key, page).as_bytes()[..size_of::<Digest>()]);
    digest
}

/// Has the pages whose digests were told.
pub trait Keeper: Send {
    /// Reads page `number` into `page`. Fails if there is none, or if it has another digest now.
    fn page(&mut self, number: u32, page: &mut [u8]) -> io::Result<()>;
}

/// The payload of a Kept frame, taken apart: the key, and the digests one after another; none of
/// them where the list ends.
pub(crate) fn parse<'a>(frame: &Frame<'a>) -> Result<(DigestKey, &'a [Digest]), FrameError> {
    let malformed = |why: &str| FrameError::Malformed { kind: frame.kind, why: why.into() };
    let (key, rest) = frame.payload.split_first_chunk().ok_or_else(|| malformed("no key"))?;
    let (digests, more) = rest.as_chunks();
    if more.is_empty() { Ok((*key, digests)) } else { Err(malformed("a part of a digest")) }
}

/// What a spare has told so far, as its reader sees it.
#[derive(Debug, Default)]
pub(crate) struct Told {
    key: Option<DigestKey>,
    count: usize,
    /// It is all.
    pub whole: bool,
}

impl Told {
    /// A frame of it: the digests that follow those before.
    pub fn take<'a>(&mut self, frame: &Frame<'a>) -> Result<(DigestKey, &'a [Digest]), FrameError> {
        let out_of_place = |why| FrameError::OutOfPlace { kind: Kind::Kept, why };
        let (key, digests) = parse(frame)?;
        if self.whole {
            return Err(out_of_place("the list has ended"));
        }
        if *self.key.get_or_insert(key) != key {
            return Err(out_of_place("another key"));
        }
        self.count += digests.len();
        if self.count > KEPT_MAX {
            return Err(out_of_place("more pages than may be told"));
        }
        self.whole = digests.is_empty();
        Ok((key, digests))
    }
}

/// What a spare has kept, for who encodes pages for it.
#[derive(Debug, Default)]
pub struct KeptPages {
    key: DigestKey,
    numbers: HashMap<Digest, u32>,
    told: u32,
    is_over: bool,
}

impl KeptPages {
    /// Learns of more, in the order in which they are told.
    pub fn learn(&mut self, key: DigestKey, digests: &[Digest]) {
        if self.is_over {
            return;
        }
        self.key = key;
        for digest in digests {
            self.numbers.entry(*digest).or_insert(self.told);
            self.told += 1;
        }
    }

    /// The number of a page with this content.
    #[must_use]
    pub fn find(&self, page: &[u8]) -> Option<u32> {
        if self.numbers.is_empty() {
            return None;
        }
        self.numbers.get(&digest(&self.key, page)).copied()
    }

    /// The spare has another ghost now.
    pub fn end(&mut self) {
        *self = Self { is_over: true, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payload: &[u8]) -> Frame<'_> {
        Frame { kind: Kind::Kept, flags: 0, checksum: 0, payload }
    }

    #[test]
    fn a_page_is_found_by_its_content_and_by_nothing_else() {
        let key = [7; 32];
        let page = |byte: u8| vec![byte; 4096];
        let mut kept = KeptPages::default();
        assert_eq!(kept.find(&page(0)), None);
        kept.learn(key, &[digest(&key, &page(3)), digest(&key, &page(4))]);
        kept.learn(key, &[digest(&key, &page(3)), digest(&key, &page(5))]);
        let found = [3, 4, 5, 6].map(|byte| kept.find(&page(byte)));
        assert_eq!(found, [Some(0), Some(1), Some(3), None]);
        kept.end();
        kept.learn(key, &[digest(&key, &page(3))]);
        assert_eq!(kept.find(&page(3)), None, "another ghost is there now");
    }

    #[test]
    fn a_list_has_one_key_and_an_end() {
        let (one, two) = ([1; 48], [[1; 32].as_slice(), &[0; 16]].concat());
        let mut told = Told::default();
        assert_eq!(told.take(&frame(&one)).unwrap().1.len(), 1);
        assert_eq!(told.take(&frame(&two)).unwrap().1.len(), 1);
        assert!(told.take(&frame(&[2; 48])).is_err(), "another key");
        assert!(told.take(&frame(&[1; 47])).is_err(), "a part of a digest");
        assert!(told.take(&frame(&[1; 31])).is_err(), "no key");
        assert!(!told.whole);
        assert!(told.take(&frame(&[1; 32])).unwrap().1.is_empty() && told.whole);
        assert!(told.take(&frame(&one)).is_err(), "after its end");
    }
}
